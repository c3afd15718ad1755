// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A thunk stands before each function of the driver that a program has asked for. It counts the
// calls that are under way, and holds new ones while the gate is closed. All registers and the stack
// are the function's own, so it needs not be known what arguments it has.
//
//	thunk i -> common -> interposer_enter(i, return address) -> the function -> after -> interposer_leave()

	.text
	.hidden interposer_enter, interposer_leave, interposer_route
	.globl interposer_thunks, interposer_thunks_end
	.hidden interposer_thunks, interposer_thunks_end

	.balign 16
interposer_thunks:
	.set i, 0
	.rept THUNKS
	.balign 16
	pushq $i
	jmp common
	.set i, i + 1
	.endr
	.balign 16
interposer_thunks_end:

// The stack has the thunk's number and above it the return address. Its pointer is a multiple of 16.
	.type common, @function
common:
	push %rdi
	push %rsi
	push %rdx
	push %rcx
	push %r8
	push %r9
	sub $128, %rsp
	movups %xmm0, (%rsp)
	movups %xmm1, 16(%rsp)
	movups %xmm2, 32(%rsp)
	movups %xmm3, 48(%rsp)
	movups %xmm4, 64(%rsp)
	movups %xmm5, 80(%rsp)
	movups %xmm6, 96(%rsp)
	movups %xmm7, 112(%rsp)
	mov 176(%rsp), %rdi
	mov 184(%rsp), %rsi
	call interposer_enter
	mov %rax, %r11 // the function
	mov %rdx, %r10 // 1: interposer_leave is to be called after it
	movups (%rsp), %xmm0
	movups 16(%rsp), %xmm1
	movups 32(%rsp), %xmm2
	movups 48(%rsp), %xmm3
	movups 64(%rsp), %xmm4
	movups 80(%rsp), %xmm5
	movups 96(%rsp), %xmm6
	movups 112(%rsp), %xmm7
	add $128, %rsp
	pop %r9
	pop %r8
	pop %rcx
	pop %rdx
	pop %rsi
	pop %rdi
	lea 8(%rsp), %rsp // the number
	test %r10, %r10
	jz 1f
	lea after(%rip), %r10
	mov %r10, (%rsp)
1:	jmp *%r11

after:
	sub $8, %rsp // for the return address
	push %rax
	call interposer_leave
	mov %rax, 8(%rsp)
	pop %rax
	ret

// dlsym, in the place of the C library's: which one answers is the matter of interposer_route. The C
// library's is jumped to, because it asks who its caller is.
	.globl dlsym
	.type dlsym, @function
dlsym:
	push %rdi
	push %rsi
	sub $8, %rsp
	mov %rsi, %rdi
	call interposer_route
	add $8, %rsp
	pop %rsi
	pop %rdi
	jmp *%rax

// The functions that programs are linked to directly: interposer.c has the names in the same order.
	.set i, 0
#define DIRECT(name) .globl name; .type name, @function; .set name, interposer_thunks + 16 * i; .set i, i + 1;
#include "direct.inc"

	.section .note.GNU-stack, "", @progbits
