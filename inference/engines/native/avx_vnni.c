#define WITH_VNNI
#include "avx2.c"
