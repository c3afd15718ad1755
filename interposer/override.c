// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Which functions of the interposer's stand in for the driver's: by the name that the library has, and without the suffix, as
// cuGetProcAddress is asked for them.

#include "block.h"

#include <string.h>

static const struct override *const tables[] = {
	alloc_overrides, ipc_overrides, peers_overrides, contexts_overrides, vmm_overrides, shared_events_overrides,
	foreign_overrides, managed_overrides, route_overrides,
};

static void *find(const struct override *table, const char *name)
{
	for (; table->name; table++)
		if (!strcmp(name, table->name))
			return table->function;
	return NULL;
}

void *override_of(const char *name)
{
	void *function = NULL;

	driver_look();
	const bool events = events_wanted();
	for (size_t i = 0; i < sizeof tables / sizeof *tables && !function; i++)
		function = find(tables[i], name);
	return function || !events ? function : find(events_overrides, name);
}
