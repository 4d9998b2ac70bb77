#define WITH_DOTPROD
#include "neon.c"
