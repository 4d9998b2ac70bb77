/* With the relaxed dot product of four bytes: one instruction where the processor has one (AVX-VNNI, ARM's dot product), and
 * five where it has not. For browsers only, where it is compared with the other: V8 11.3 (Node 20) computes it wrongly on
 * processors with AVX-VNNI. */
#if defined(__wasm_relaxed_simd__) && defined(FOR_BROWSERS)
#define WITH_RELAXED
#define WITH_DOT
#include "wasm.c"
#endif
