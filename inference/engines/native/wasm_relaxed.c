#ifdef __wasm_relaxed_simd__
#define WITH_RELAXED
#include "wasm.c"
#endif
