// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The GPU code of all workloads, as PTX that the driver compiles when the module is loaded (ISA 7.0:
// CUDA 11 and newer; sm_50: every GPU that a driver >= 570 drives). The software GPU runs the same
// entries by their names (softcuda/kernels.c).

#ifndef GPUCKPT_KERNELS_H
#define GPUCKPT_KERNELS_H

// x = splitmix64(x), with t as scratch
#define PTX_MIX(x, t)                            \
	"add.u64 " x ", " x ", 0x9e3779b97f4a7c15;\n"    \
	"shr.u64 " t ", " x ", 30;\n"                    \
	"xor.b64 " x ", " x ", " t ";\n"                 \
	"mul.lo.u64 " x ", " x ", 0xbf58476d1ce4e5b9;\n" \
	"shr.u64 " t ", " x ", 27;\n"                    \
	"xor.b64 " x ", " x ", " t ";\n"                 \
	"mul.lo.u64 " x ", " x ", 0x94d049bb133111eb;\n" \
	"shr.u64 " t ", " x ", 31;\n"                    \
	"xor.b64 " x ", " x ", " t ";\n"

// x = (mix(x) & keep) | fixed: the words that memory is filled with
#define PTX_WORD(x, t)                           \
	PTX_MIX(x, t)                                    \
	"and.b64 " x ", " x ", %keep;\n"                \
	"or.b64 " x ", " x ", %fixed;\n"

// %words, %count, %seed, %keep, %fixed from the parameters; %i = this thread's index, %step = number
// of threads
#define PTX_GRID_STRIDE                         \
	".reg .pred %done;\n"                           \
	".reg .u32 %block, %width, %lane, %blocks;\n"   \
	".reg .u64 %words, %count, %seed, %i, %step;\n" \
	".reg .u64 %keep, %fixed;\n"                    \
	"ld.param.u64 %words, [words];\n"               \
	"ld.param.u64 %count, [count];\n"               \
	"ld.param.u64 %seed, [seed];\n"                 \
	"ld.param.u64 %keep, [keep];\n"                 \
	"ld.param.u64 %fixed, [fixed];\n"               \
	"cvta.to.global.u64 %words, %words;\n"          \
	"mov.u32 %block, %ctaid.x;\n"                   \
	"mov.u32 %width, %ntid.x;\n"                    \
	"mov.u32 %lane, %tid.x;\n"                      \
	"mov.u32 %blocks, %nctaid.x;\n"                 \
	"cvt.u64.u32 %step, %lane;\n"                   \
	"mul.wide.u32 %i, %block, %width;\n"            \
	"add.u64 %i, %i, %step;\n"                      \
	"mul.wide.u32 %step, %blocks, %width;\n"

static const char kernels_ptx[] =
	".version 7.0\n"
	".target sm_50\n"
	".address_size 64\n"

	".visible .global .align 8 .u64 counter = 100;\n"

	".visible .entry increment(.param .u64 counter_address) {\n"
	".reg .u64 %at, %value;\n"
	"ld.param.u64 %at, [counter_address];\n"
	"cvta.to.global.u64 %at, %at;\n"
	"ld.global.u64 %value, [%at];\n"
	"add.u64 %value, %value, 1;\n"
	"st.global.u64 [%at], %value;\n"
	"ret;\n"
	"}\n"

	".visible .entry fill(.param .u64 words, .param .u64 count, .param .u64 seed,\n"
	"                     .param .u64 keep, .param .u64 fixed) {\n"
	".reg .u64 %x, %t, %at;\n"
	PTX_GRID_STRIDE
	"fill_next:\n"
	"setp.ge.u64 %done, %i, %count;\n"
	"@%done bra fill_end;\n"
	"add.u64 %x, %i, %seed;\n"
	PTX_WORD("%x", "%t")
	"shl.b64 %at, %i, 3;\n"
	"add.u64 %at, %words, %at;\n"
	"st.global.u64 [%at], %x;\n"
	"add.u64 %i, %i, %step;\n"
	"bra fill_next;\n"
	"fill_end:\n"
	"ret;\n"
	"}\n"

	".visible .entry check(.param .u64 words, .param .u64 count, .param .u64 seed,\n"
	"                      .param .u64 keep, .param .u64 fixed, .param .u64 bad_address) {\n"
	".reg .pred %equal;\n"
	".reg .u64 %x, %t, %at, %found, %bad;\n"
	PTX_GRID_STRIDE
	"ld.param.u64 %bad, [bad_address];\n"
	"cvta.to.global.u64 %bad, %bad;\n"
	"check_next:\n"
	"setp.ge.u64 %done, %i, %count;\n"
	"@%done bra check_end;\n"
	"add.u64 %x, %i, %seed;\n"
	PTX_WORD("%x", "%t")
	"shl.b64 %at, %i, 3;\n"
	"add.u64 %at, %words, %at;\n"
	"ld.global.u64 %found, [%at];\n"
	"setp.eq.u64 %equal, %found, %x;\n"
	"@%equal bra check_same;\n"
	"red.global.add.u64 [%bad], 1;\n"
	"check_same:\n"
	"add.u64 %i, %i, %step;\n"
	"bra check_next;\n"
	"check_end:\n"
	"ret;\n"
	"}\n"

	".visible .entry spin(.param .u64 flag_address) {\n"
	".reg .pred %unset;\n"
	".reg .u64 %at;\n"
	".reg .u32 %flag;\n"
	"ld.param.u64 %at, [flag_address];\n"
	"cvta.to.global.u64 %at, %at;\n"
	"spin_next:\n"
	"ld.volatile.global.u32 %flag, [%at];\n"
	"setp.eq.u32 %unset, %flag, 0;\n"
	"@%unset bra spin_next;\n"
	"ret;\n"
	"}\n"

	// The board: 64 step numbers, and 64 words each of the steps with even and with odd numbers.
	".visible .entry meet(.param .u64 board_address, .param .u64 rank_count, .param .u64 rank_number,\n"
	"                     .param .u64 state_address) {\n"
	".reg .pred %p;\n"
	".reg .u64 %board, %count, %mine, %state, %step, %sum, %words, %x, %t, %at, %i;\n"
	"ld.param.u64 %board, [board_address];\n"
	"ld.param.u64 %count, [rank_count];\n"
	"ld.param.u64 %mine, [rank_number];\n"
	"ld.param.u64 %state, [state_address];\n"
	"cvta.to.global.u64 %board, %board;\n"
	"cvta.to.global.u64 %state, %state;\n"
	"ld.global.u64 %step, [%state];\n"
	"ld.global.u64 %sum, [%state+8];\n"
	"add.u64 %step, %step, 1;\n"
	"and.b64 %words, %step, 1;\n"
	"shl.b64 %words, %words, 9;\n"
	"add.u64 %words, %words, %board;\n"
	"add.u64 %words, %words, 512;\n"
	"shl.b64 %x, %mine, 32;\n"
	"add.u64 %x, %x, %step;\n"
	"add.u64 %x, %x, %sum;\n"
	PTX_MIX("%x", "%t")
	"shl.b64 %at, %mine, 3;\n"
	"add.u64 %t, %words, %at;\n"
	"st.volatile.global.u64 [%t], %x;\n"
	"membar.sys;\n"
	"add.u64 %t, %board, %at;\n"
	"st.volatile.global.u64 [%t], %step;\n"
	"mov.u64 %i, 0;\n"
	"meet_next:\n"
	"setp.ge.u64 %p, %i, %count;\n"
	"@%p bra meet_end;\n"
	"shl.b64 %at, %i, 3;\n"
	"add.u64 %t, %board, %at;\n"
	"meet_wait:\n"
	"ld.volatile.global.u64 %x, [%t];\n"
	"setp.lt.u64 %p, %x, %step;\n"
	"@%p bra meet_wait;\n"
	"membar.sys;\n"
	"add.u64 %t, %words, %at;\n"
	"ld.volatile.global.u64 %x, [%t];\n"
	"add.u64 %sum, %sum, %x;\n"
	"add.u64 %i, %i, 1;\n"
	"bra meet_next;\n"
	"meet_end:\n"
	"st.global.u64 [%state], %step;\n"
	"st.global.u64 [%state+8], %sum;\n"
	"ret;\n"
	"}\n";

#endif
