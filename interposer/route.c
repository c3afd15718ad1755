// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Which function of the driver is behind which thunk. Programs reach the driver in three ways: linked
// to it, by dlsym, and by cuGetProcAddress, which they have from one of the first two. CUDA's runtime
// library, static or not, uses dlsym and then cuGetProcAddress.

#include "block.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <unistd.h>

// In a library of their own before glibc 2.34, which a program may lack.
#pragma weak dlopen
#pragma weak dladdr
extern const char interposer_thunks[], interposer_thunks_end[];
extern void *dlvsym(void *, const char *, const char *) __attribute__((weak));
extern int dl_iterate_phdr(int (*)(struct dl_phdr_info *, size_t, void *), void *) __attribute__((weak));

bool interposer_passive;

static const char *const direct[] = {
#define DIRECT(name) #name,
#include "direct.inc"
#undef DIRECT
};
enum { DIRECTS = sizeof direct / sizeof *direct };

static const char *const quiet[] = {
#define QUIET(name) #name,
#include "quiet.inc"
#undef QUIET
};

// What each thunk calls; LOCK_THUNKS is for those that have no names. The first DIRECTS have names, and are looked up at their first call.
static void *targets[THUNKS];
static void *reals[THUNKS]; // the driver's function, where the target is the interposer's
static unsigned used = DIRECTS;

static void *(*libc_dlsym)(void *, const char *);

void interposer_write(const char *text)
{
	ssize_t n = write(2, text, strlen(text));
	(void)n;
}

static void *no_dlsym(void *handle, const char *name)
{
	(void)handle, (void)name;
	interposer_say("this C library has no dlvsym: start the program without the interposer");
	return NULL;
}

static void *(*find_dlsym(void))(void *, const char *)
{
	void *found = __atomic_load_n(&libc_dlsym, __ATOMIC_ACQUIRE);

	if (!found && dlvsym) // the version that every C library of GNU's has on x86-64
		found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
	if (!found)
		found = no_dlsym;
	__atomic_store_n(&libc_dlsym, found, __ATOMIC_RELEASE);
	return found;
}

static struct link_map *library(void)
{
	static void *handle;

	if (!handle)
		handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	return handle;
}

// is_driver reports whether an address is in the driver's library. A program may have another copy, or one of the
// same name that stands before the driver's.
static bool is_driver(void *address)
{
	Dl_info info;

	return address && library() && dladdr(address, &info) && info.dli_fname && !strcmp(info.dli_fname, library()->l_name);
}

void *interposer_real(const char *name)
{
	void *found = NULL;

	if (library())
		found = find_dlsym()(library(), name);
	return is_driver(found) ? found : NULL;
}

static CUresult missing(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

static bool is_thunk(const void *p)
{
	return (const char *)p >= interposer_thunks && (const char *)p < interposer_thunks_end;
}

void *interposer_target(uint32_t thunk) __attribute__((visibility("hidden")));
void *interposer_target(uint32_t thunk)
{
	void *target = __atomic_load_n(&targets[thunk], __ATOMIC_ACQUIRE);

	if (target || thunk >= DIRECTS)
		return target;
	void *real = interposer_real(direct[thunk]);
	if (!real)
		return missing;
	target = interposer_passive ? NULL : override_of(direct[thunk]);
	reals[thunk] = real;
	__atomic_store_n(&targets[thunk], target ? target : real, __ATOMIC_RELEASE);
	return targets[thunk];
}

// direct_of returns the thunk that has a name, DIRECTS for none.
static size_t direct_of(const char *name)
{
	size_t i = 0;

	while (i < DIRECTS && strcmp(name, direct[i]))
		i++;
	return i;
}

static bool is_quiet(const char *name)
{
	for (size_t i = 0; i < sizeof quiet / sizeof *quiet; i++)
		if (!strcmp(name, quiet[i]))
			return true;
	return false;
}

// thunk_for returns the thunk of a function of the driver's: the same for the same function.
static void *thunk_for(const char *name, void *real)
{
	void *target, *thunk = real;

	if (interposer_passive || is_thunk(real) || is_quiet(name))
		return real;
	size_t known = direct_of(name);
	if (known < DIRECTS && interposer_real(name) == real)
		return (void *)(interposer_thunks + 16 * known);
	target = override_of(name);
	target = target ? target : real;
	lock(LOCK_THUNKS);
	for (unsigned i = 0; i < used; i++) {
		if (reals[i] == real && targets[i] == target) {
			thunk = (void *)(interposer_thunks + 16 * (size_t)i);
			goto out;
		}
	}
	if (used == THUNKS) {
		interposer_passive = true; // a call past the gate would reach memory that is not there
		interposer_say("the program uses more functions of the driver than the interposer has room for: it does nothing here");
		goto out;
	}
	reals[used] = real;
	__atomic_store_n(&targets[used], target, __ATOMIC_RELEASE);
	thunk = (void *)(interposer_thunks + 16 * (size_t)used++);
out:
	unlock(LOCK_THUNKS);
	return thunk;
}

// our_dlsym is dlsym for names that the driver's functions could have.
static void *our_dlsym(void *handle, const char *name)
{
	void *real = find_dlsym()(handle, name);

	// The C library looks behind this library, not behind the caller: what it finds may be the caller's own.
	if (handle == RTLD_NEXT && real && !is_driver(real) && interposer_real(name))
		real = interposer_real(name);
	return is_driver(real) ? thunk_for(name, real) : real;
}

// interposer_route returns the function that answers a dlsym of that name.
void *interposer_route(const char *name) __attribute__((visibility("hidden")));
void *interposer_route(const char *name)
{
	void *(*libc)(void *, const char *) = find_dlsym();

	return name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z' ? our_dlsym : libc;
}

// The driver adds _v2 and the like to the name by the version that is asked for.
static CUresult wrap(CUresult r, const char *symbol, void **address)
{
	static const char *const suffixes[] = {"", "_v2", "_v3", "_v4", "_ptsz", "_v2_ptsz", "_ptds", "_v2_ptds"};
	char name[128];
	Dl_info info;

	if (r || !symbol || !address || !*address || is_thunk(*address))
		return r;
	// By what it is in the library, if that has it: cuMemAlloc is cuMemAlloc_v2 there.
	for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
		if (strlen(symbol) + sizeof "_v2_ptsz" > sizeof name)
			return r;
		strcpy(name, symbol);
		strcat(name, suffixes[i]);
		if (interposer_real(name) == *address) {
			*address = thunk_for(name, *address);
			return r;
		}
	}
	if (is_quiet(symbol))
		return r;
	// A variant that the library does not export by such a name: per-thread streams, for one.
	*address = thunk_for(dladdr(*address, &info) && info.dli_sname && info.dli_saddr == *address ? info.dli_sname : symbol, *address);
	return r;
}

static CUresult get_proc_address(const char *symbol, void **address, int version, uint64_t flags)
{
	return wrap(driver.cuGetProcAddress(symbol, address, version, flags), symbol, address);
}

static CUresult get_proc_address_v2(const char *symbol, void **address, int version, uint64_t flags, int *status)
{
	return wrap(driver.cuGetProcAddress_v2(symbol, address, version, flags, status), symbol, address);
}

const struct override route_overrides[] = {
	{"cuGetProcAddress", get_proc_address}, {"cuGetProcAddress_v2", get_proc_address_v2},
	{NULL, NULL},
};

// links is what the objects in this process are linked to. While the loader tells of them nothing can be looked up: that
// may wait for another thread, which waits for the loader.
struct links {
	void *direct[DIRECTS]; // the driver's functions
	bool past;             // one is linked to past its thunk, as by RTLD_DEEPBIND; or there is another copy of the library
	size_t used;
	char unknown[1 << 14]; // names of functions that have no thunk
};

static void note_link(struct links *l, const char *name, const void *to)
{
	size_t known = direct_of(name), bytes = strlen(name) + 1;

	if (is_quiet(name))
		return;
	if (known < DIRECTS || bytes > sizeof l->unknown - l->used) {
		l->past |= known == DIRECTS || (to && to == l->direct[known]);
		return;
	}
	memcpy(l->unknown + l->used, name, bytes);
	l->used += bytes;
}

static int look_at(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct links *links = arg;
	const ElfW(Dyn) *d = NULL;
	const ElfW(Rela) *tables[2] = {NULL, NULL};
	size_t bytes[2] = {0, 0};
	const ElfW(Sym) *symbols = NULL;
	const char *strings = NULL, *base = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;

	(void)size;
	if (base && !strncmp(base, "/libcuda.so", 11)) { // it calls itself
		links->past |= info->dlpi_addr != library()->l_addr;
		return 0;
	}
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			d = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	for (; d && d->d_tag != DT_NULL; d++) {
		// The loader has made addresses of what are offsets in the file, but not in the vDSO.
		if (d->d_un.d_ptr < info->dlpi_addr && (d->d_tag == DT_SYMTAB || d->d_tag == DT_STRTAB))
			return 0;
		switch (d->d_tag) {
		case DT_SYMTAB: symbols = (const ElfW(Sym) *)d->d_un.d_ptr; break;
		case DT_STRTAB: strings = (const char *)d->d_un.d_ptr; break;
		case DT_JMPREL: tables[0] = (const ElfW(Rela) *)d->d_un.d_ptr; break;
		case DT_PLTRELSZ: bytes[0] = d->d_un.d_val; break;
		case DT_RELA: tables[1] = (const ElfW(Rela) *)d->d_un.d_ptr; break;
		case DT_RELASZ: bytes[1] = d->d_un.d_val; break;
		}
	}
	for (int t = 0; t < 2 && symbols && strings; t++) {
		for (size_t i = 0; tables[t] && i < bytes[t] / sizeof *tables[t]; i++) {
			size_t s = ELF64_R_SYM(tables[t][i].r_info);
			const char *name = strings + symbols[s].st_name;
			if (s && symbols[s].st_shndx == SHN_UNDEF && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z')
				note_link(links, name, *(void **)(info->dlpi_addr + tables[t][i].r_offset));
		}
	}
	return 0;
}

bool interposer_bypassed(void)
{
	struct links l = {.past = interposer_passive || !dl_iterate_phdr, .used = 0};

	for (size_t i = 0; i < DIRECTS; i++)
		l.direct[i] = find_dlsym()(library(), direct[i]);
	if (!l.past)
		dl_iterate_phdr(look_at, &l);
	for (const char *name = l.unknown; !l.past && name < l.unknown + l.used; name += strlen(name) + 1)
		l.past = interposer_real(name);
	return l.past;
}
