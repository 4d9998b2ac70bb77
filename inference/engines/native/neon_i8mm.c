#define WITH_I8MM
#include "neon.c"
