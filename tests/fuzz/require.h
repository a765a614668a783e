#pragma once

#include <cstdio>
#include <cstdlib>

/// A finding of a fuzz target: says what was expected, then ends the process so that libFuzzer keeps the input.
#define HERRING_REQUIRE(condition)                                                        \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)
