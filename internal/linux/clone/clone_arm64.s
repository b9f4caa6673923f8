#include "textflag.h"

// func clone3(args *cloneArgs, size uintptr, calls *call) int
//
// As in clone_amd64.s; the kernel preserves every register but R0.
TEXT ·clone3(SB), NOSPLIT|NOFRAME, $0-32
	MOVD	args+0(FP), R0
	MOVD	size+8(FP), R1
	MOVD	calls+16(FP), R20
	MOVD	$435, R8	// SYS_clone3
	SVC
	CBZ	R0, next
	MOVD	R0, ret+24(FP)
	RET

next:
	MOVD	0(R20), R8
	MOVD	8(R20), R0
	MOVD	16(R20), R1
	MOVD	24(R20), R2
	MOVD	32(R20), R3
	MOVD	40(R20), R4
	SVC
	MOVD	48(R20), R9
	CMP	R9, R0
	BLT	failed
	ADD	$64, R20
	B	next

failed:
	CBNZ	R0, store
	MOVD	$1, R0

store:
	MOVD	R0, 56(R20)

exit:
	MOVD	$127, R0
	MOVD	$94, R8	// SYS_exit_group
	SVC
	B	exit
