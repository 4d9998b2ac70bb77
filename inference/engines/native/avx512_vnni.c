#define WITH_VNNI
#include "avx512.c"
