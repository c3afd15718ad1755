// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// What runs in a target while its driver copies: see ../copiers_amd64.go. This
// page of code is followed by a page of data, at the offsets below. It is made
// into copier.bin by `make trace/copier/copier.bin`; a test compares them.
//
// Nothing here needs a stack of its own, more than baseline x86-64, or anything
// of the C library. Slices are handed out by a single word, `job`, so that each
// is copied once, by whoever comes first: the caller alone, if it must be.

	.set	original, 4096	// the memcpy that this stands in for
	.set	job, 4160	// 16 bits next slice, 16 bits slices, 32 bits generation
	.set	generation, 4164
	.set	left, 4224	// slices that are not copied yet
	.set	busy, 4288	// 1 while a call is being handed out
	.set	to, 4296
	.set	from, 4304
	.set	bytes, 4312
	.set	copied, 4320	// bytes in all, for who looks
	.set	sleepers, 4352
	.set	stop, 4356	// 1: copiers end
	.set	patience, 4360	// struct timespec: they end after so long without work
	.set	was, 4384	// what swap took out
				// 4392: how many stacks are given out

	.set	sliceShift, 17
	.set	slice, 1 << sliceShift
	.set	least, 512 << 10 // a shorter copy is left to the original
	.set	most, 16 << 20	 // what a stopped caller cannot stop; 65535 slices are 8 GiB
	// Pauses before a thread makes a system call. The driver's thread is traced, which
	// makes its calls slow; it comes with the next copy after some 0.05 ms.
	.set	callerSpins, 5000
	.set	copierSpins, 20000

	.set	SYS_sched_yield, 24
	.set	SYS_getpid, 39
	.set	SYS_exit, 60
	.set	SYS_futex, 202
	.set	FUTEX_WAIT_PRIVATE, 128
	.set	FUTEX_WAKE_PRIVATE, 129
	.set	ETIMEDOUT, 110

	.macro	page
	lea	base(%rip), %r11
	.endm

	// 64 bytes at an offset, by four registers.
	.macro	fetch at, a, b, c, d
	movups	\at(%rsi), %xmm\a
	movups	\at+16(%rsi), %xmm\b
	movups	\at+32(%rsi), %xmm\c
	movups	\at+48(%rsi), %xmm\d
	.endm
	.macro	store at, a, b, c, d
	movntps	%xmm\a, \at(%rdi)
	movntps	%xmm\b, \at+16(%rdi)
	movntps	%xmm\c, \at+32(%rdi)
	movntps	%xmm\d, \at+48(%rdi)
	.endm

	.text
base:
// void *entry(void *to, const void *from, size_t bytes): as memcpy.
entry:
	endbr64
	cmp	$least, %rdx
	jb	aside
	cmp	$most, %rdx
	ja	aside
	mov	%rdi, %rax	// stores past the cache want 16-byte steps
	or	%rdx, %rax
	test	$63, %al
	jnz	aside
	mov	%rdi, %rax	// an overlap is the original's business
	sub	%rsi, %rax
	cmp	%rdx, %rax
	jb	aside
	neg	%rax
	cmp	%rdx, %rax
	jb	aside
	page
	mov	$1, %ecx
	xchg	%ecx, busy(%r11)
	test	%ecx, %ecx
	jnz	aside
	mov	%rdi, to(%r11)
	mov	%rsi, from(%r11)
	mov	%rdx, bytes(%r11)
	add	%rdx, copied(%r11)
	lea	slice-1(%rdx), %rcx
	shr	$sliceShift, %rcx
	mov	%ecx, left(%r11)
	mov	generation(%r11), %eax
	inc	%eax
	shl	$32, %rax
	shl	$16, %rcx
	or	%rcx, %rax
	xchg	%rax, job(%r11)	// from here on slices are taken
	cmpl	$0, sleepers(%r11)
	je	1f
	lea	generation(%r11), %rdi
	mov	$FUTEX_WAKE_PRIVATE, %esi
	mov	$0x7fffffff, %edx
	mov	$SYS_futex, %eax
	syscall
	page
1:	call	work
2:	mov	$callerSpins, %ecx
3:	cmpl	$0, left(%r11)
	je	4f
	pause
	dec	%ecx
	jnz	3b
	mov	$SYS_sched_yield, %eax // whoever has the last slice may need this processor
	syscall
	page
	jmp	2b
4:	mov	to(%r11), %rax
	movl	$0, busy(%r11)
	ret
aside:
	jmp	*base+original(%rip)

// work copies slices until none is left to take. %r11 is the page; %rax is then
// the job.
work:
	mov	job(%r11), %rax
1:	movzwl	%ax, %ecx
	mov	%eax, %r8d
	shr	$16, %r8d
	cmp	%r8d, %ecx
	jae	7f
	lea	1(%rax), %r9
	lock cmpxchg %r9, job(%r11)
	jne	1b
	// The slice is this thread's: what describes the job stays until it is copied.
	shl	$sliceShift, %rcx
	mov	bytes(%r11), %rdx
	sub	%rcx, %rdx
	mov	$slice, %r8d
	cmp	%r8, %rdx
	cmova	%r8, %rdx
	mov	from(%r11), %rsi
	add	%rcx, %rsi
	mov	to(%r11), %rdi
	add	%rcx, %rdi
	// Four pages side by side, since a processor fetches ahead within each only.
2:	cmp	$4*4096, %rdx
	jb	4f
	mov	$4096/64, %ecx
3:	fetch	0, 0, 1, 2, 3
	fetch	4096, 4, 5, 6, 7
	fetch	2*4096, 8, 9, 10, 11
	fetch	3*4096, 12, 13, 14, 15
	store	0, 0, 1, 2, 3
	store	4096, 4, 5, 6, 7
	store	2*4096, 8, 9, 10, 11
	store	3*4096, 12, 13, 14, 15
	add	$64, %rsi
	add	$64, %rdi
	dec	%ecx
	jnz	3b
	add	$3*4096, %rsi
	add	$3*4096, %rdi
	sub	$4*4096, %rdx
	jmp	2b
4:	test	%rdx, %rdx
	jz	6f
5:	fetch	0, 0, 1, 2, 3
	store	0, 0, 1, 2, 3
	add	$64, %rsi
	add	$64, %rdi
	sub	$64, %rdx
	jnz	5b
6:	sfence
	lock decl left(%r11)
	jmp	work
7:	ret

// copier is a thread's whole life.
	.org	768
copier:
	page
1:	call	work
	mov	%rax, %r12
	shr	$32, %r12
	mov	$copierSpins, %ecx
2:	cmpl	$0, stop(%r11)
	jne	5f
	cmp	generation(%r11), %r12d
	jne	1b
	pause
	dec	%ecx
	jnz	2b
	lock incl sleepers(%r11)
	lea	generation(%r11), %rdi
	mov	$FUTEX_WAIT_PRIVATE, %esi
	mov	%r12d, %edx
	lea	patience(%r11), %r10
	mov	$SYS_futex, %eax
	syscall
	page
	lock decl sleepers(%r11)
	cmp	$-ETIMEDOUT, %rax
	je	5f
	jmp	1b
5:	xor	%edi, %edi
	mov	$SYS_exit, %eax
	syscall
	ud2

// swap(uint64_t *at, uint64_t value) exchanges the two at once, then makes a system
// call that does nothing, at which a tracer stops it.
	.org	1024
swap:
	xchg	%rsi, (%rdi)
	page
	mov	%rsi, was(%r11)
	mov	$SYS_getpid, %eax
	syscall
	ret
