/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The constants that the loader sets before it loads the programs. */
#pragma once

#include "kernel.h"
#include "layout.h"

/* Set by the loader. */
const struct settings settings SEC(".rodata") = {};

/* Hides from the compiler that the settings are zero at compile time. */
INLINE const struct settings *set(void)
{
	const struct settings *pointer = &settings;
	asm volatile("" : "+r"(pointer));
	return pointer;
}
