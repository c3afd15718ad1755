// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// The state of 16 compressions is in Z0 to Z15, one word of each in a register, and their message
// in Z16 to Z31. BLAKE3 paper, section 2.2.

DATA iv<>+0(SB)/4, $0x6A09E667
DATA iv<>+4(SB)/4, $0xBB67AE85
DATA iv<>+8(SB)/4, $0x3C6EF372
DATA iv<>+12(SB)/4, $0xA54FF53A
DATA iv<>+16(SB)/4, $0x510E527F
DATA iv<>+20(SB)/4, $0x9B05688C
DATA iv<>+24(SB)/4, $0x1F83D9AB
DATA iv<>+28(SB)/4, $0x5BE0CD19
DATA iv<>+32(SB)/4, $64 // the length of a block
GLOBL iv<>(SB), RODATA|NOPTR, $36

#define G(a, b, c, d, x, y) \
	VPADDD b, a, a; VPADDD x, a, a; VPXORD a, d, d; VPRORD $16, d, d; \
	VPADDD d, c, c; VPXORD c, b, b; VPRORD $12, b, b; \
	VPADDD b, a, a; VPADDD y, a, a; VPXORD a, d, d; VPRORD $8, d, d; \
	VPADDD d, c, c; VPXORD c, b, b; VPRORD $7, b, b

#define ROUND(m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15) \
	G(Z0, Z4, Z8, Z12, m0, m1) \
	G(Z1, Z5, Z9, Z13, m2, m3) \
	G(Z2, Z6, Z10, Z14, m4, m5) \
	G(Z3, Z7, Z11, Z15, m6, m7) \
	G(Z0, Z5, Z10, Z15, m8, m9) \
	G(Z1, Z6, Z11, Z12, m10, m11) \
	G(Z2, Z7, Z8, Z13, m12, m13) \
	G(Z3, Z4, Z9, Z14, m14, m15)

// LOAD reads a block of each of four inputs, and has lane L of the k-th register hold the words
// 4L+k of the four.
#define LOAD(at, a, b, c, d) \
	VMOVDQU32  (at), Z8; \
	VPUNPCKLDQ (at)(DX*1), Z8, Z9; \
	VPUNPCKHDQ (at)(DX*1), Z8, Z10; \
	VMOVDQU32  (at)(DX*2), Z11; \
	VPUNPCKLDQ (at)(R12*1), Z11, Z12; \
	VPUNPCKHDQ (at)(R12*1), Z11, Z13; \
	VPUNPCKLQDQ Z12, Z9, a; \
	VPUNPCKHQDQ Z12, Z9, b; \
	VPUNPCKLQDQ Z13, Z10, c; \
	VPUNPCKHQDQ Z13, Z10, d

// LANES has the four registers hold each one lane of all four in the place of all lanes of one.
#define LANES(a, b, c, d) \
	VSHUFI32X4 $0x88, b, a, Z8; \
	VSHUFI32X4 $0x88, d, c, Z9; \
	VSHUFI32X4 $0xdd, b, a, Z10; \
	VSHUFI32X4 $0xdd, d, c, Z11; \
	VSHUFI32X4 $0x88, Z9, Z8, a; \
	VSHUFI32X4 $0x88, Z11, Z10, b; \
	VSHUFI32X4 $0xdd, Z9, Z8, c; \
	VSHUFI32X4 $0xdd, Z11, Z10, d

// WORDS is the reverse of LOAD in registers, for half a chaining value.
#define WORDS(a, b, c, d) \
	VPUNPCKLDQ b, a, Z8; \
	VPUNPCKHDQ b, a, Z9; \
	VPUNPCKLDQ d, c, Z10; \
	VPUNPCKHDQ d, c, Z11; \
	VPUNPCKLQDQ Z10, Z8, a; \
	VPUNPCKHQDQ Z10, Z8, b; \
	VPUNPCKLQDQ Z11, Z9, c; \
	VPUNPCKHQDQ Z11, Z9, d

#define STORE(z, at) \
	VEXTRACTI32X4 $0, z, (at+0)(DI); \
	VEXTRACTI32X4 $1, z, (at+128)(DI); \
	VEXTRACTI32X4 $2, z, (at+256)(DI); \
	VEXTRACTI32X4 $3, z, (at+384)(DI)

#define FETCH(at) PREFETCHT0 (at)(R13); PREFETCHT0 (at+64)(R13); PREFETCHT0 (at+128)(R13); PREFETCHT0 (at+192)(R13)

// func compress16(out *[16][8]uint32, in *byte, stride, blocks uint64, counters *[2][16]uint32, flags *[16]uint32)
TEXT ·compress16(SB), NOSPLIT, $0-48
	MOVQ out+0(FP), DI
	MOVQ in+8(FP), SI
	MOVQ stride+16(FP), DX
	MOVQ blocks+24(FP), CX
	MOVQ counters+32(FP), R8
	MOVQ flags+40(FP), R9
	LEAQ (DX)(DX*2), R12
	LEAQ (SI)(DX*4), R10
	LEAQ (SI)(DX*8), R11
	LEAQ (R10)(DX*8), R14
	LEAQ (R14)(DX*4), R13 // what follows the inputs
	LEAQ iv<>(SB), AX
	VPBROADCASTD 0(AX), Z0
	VPBROADCASTD 4(AX), Z1
	VPBROADCASTD 8(AX), Z2
	VPBROADCASTD 12(AX), Z3
	VPBROADCASTD 16(AX), Z4
	VPBROADCASTD 20(AX), Z5
	VPBROADCASTD 24(AX), Z6
	VPBROADCASTD 28(AX), Z7

block:
	LOAD(SI, Z16, Z17, Z18, Z19)
	LOAD(R10, Z20, Z21, Z22, Z23)
	LOAD(R11, Z24, Z25, Z26, Z27)
	LOAD(R14, Z28, Z29, Z30, Z31)
	FETCH(0)
	FETCH(256)
	FETCH(512)
	FETCH(768)
	LANES(Z16, Z20, Z24, Z28)
	LANES(Z17, Z21, Z25, Z29)
	LANES(Z18, Z22, Z26, Z30)
	LANES(Z19, Z23, Z27, Z31)
	VPBROADCASTD 0(AX), Z8
	VPBROADCASTD 4(AX), Z9
	VPBROADCASTD 8(AX), Z10
	VPBROADCASTD 12(AX), Z11
	VMOVDQU32 0(R8), Z12
	VMOVDQU32 64(R8), Z13
	VPBROADCASTD 32(AX), Z14
	VPBROADCASTD (R9), Z15
	ROUND(Z16, Z17, Z18, Z19, Z20, Z21, Z22, Z23, Z24, Z25, Z26, Z27, Z28, Z29, Z30, Z31)
	ROUND(Z18, Z22, Z19, Z26, Z23, Z16, Z20, Z29, Z17, Z27, Z28, Z21, Z25, Z30, Z31, Z24)
	ROUND(Z19, Z20, Z26, Z28, Z29, Z18, Z23, Z30, Z22, Z21, Z25, Z16, Z27, Z31, Z24, Z17)
	ROUND(Z26, Z23, Z28, Z25, Z30, Z19, Z29, Z31, Z20, Z16, Z27, Z18, Z21, Z24, Z17, Z22)
	ROUND(Z28, Z29, Z25, Z27, Z31, Z26, Z30, Z24, Z23, Z18, Z21, Z19, Z16, Z17, Z22, Z20)
	ROUND(Z25, Z30, Z27, Z21, Z24, Z28, Z31, Z17, Z29, Z19, Z16, Z26, Z18, Z22, Z20, Z23)
	ROUND(Z27, Z31, Z21, Z16, Z17, Z25, Z24, Z22, Z30, Z26, Z18, Z28, Z19, Z20, Z23, Z29)
	VPXORD Z8, Z0, Z0
	VPXORD Z9, Z1, Z1
	VPXORD Z10, Z2, Z2
	VPXORD Z11, Z3, Z3
	VPXORD Z12, Z4, Z4
	VPXORD Z13, Z5, Z5
	VPXORD Z14, Z6, Z6
	VPXORD Z15, Z7, Z7
	ADDQ $64, SI
	ADDQ $64, R10
	ADDQ $64, R11
	ADDQ $64, R14
	ADDQ $4, R9
	ADDQ $1024, R13
	DECQ CX
	JNZ  block

	WORDS(Z0, Z1, Z2, Z3)
	WORDS(Z4, Z5, Z6, Z7)
	STORE(Z0, 0)
	STORE(Z1, 32)
	STORE(Z2, 64)
	STORE(Z3, 96)
	STORE(Z4, 16)
	STORE(Z5, 48)
	STORE(Z6, 80)
	STORE(Z7, 112)
	VZEROUPPER
	RET
