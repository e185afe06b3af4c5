/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The constants that the loader sets before it loads the programs. */
#pragma once

#include "kernel.h"
#include "layout.h"

/* Zero at compile time; see `set`. */
const struct settings settings SEC(".rodata") = {};

/* Returns the settings through a pointer that the compiler cannot trace, so that it does not use the zeros above. */
INLINE const struct settings *set(void)
{
	const struct settings *pointer = &settings;
	asm volatile("" : "+r"(pointer));
	return pointer;
}
