// OSCAR_MULTIVERSION: compiles a function once per instruction set and picks at load time. Used for
// plain loops whose result may not depend on the choice: each output element is a sum in one fixed
// order, contraction is off, and wider registers only take more elements at once, so every version
// gives the same bits. Left out under sanitizers, whose run-time is not ready when the loader
// picks.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define OSCAR_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OSCAR_MULTIVERSION
#endif
