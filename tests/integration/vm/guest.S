/* SPDX-License-Identifier: Apache-2.0
 *
 * A whole operating system in a boot sector: it prompts, echoes what is typed, and with Enter writes the line to the disk's second sector
 * and says so on the serial port. It knows the BIOS, the serial port's registers and nothing else.
 */
	.code16
	.globl _start
_start:
	xorw %ax, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	movw $0x7000, %sp
	movb %dl, drive
	cld
	movw $0x0003, %ax	/* 80x25 text, an empty screen */
	int $0x10
	movb $1, %ah		/* no cursor: it would blink */
	movw $0x2000, %cx
	int $0x10
	movw $booted, %si
	call serial
prompt:
	movw $asking, %si
	call print
	movw $0x8000, %di	/* the line */
next:
	xorb %ah, %ah
	int $0x16
	cmpb $13, %al
	je save
	stosb
	call put
	jmp next
save:
	movw %di, %cx
	subw $0x8000, %cx
	xorb %al, %al
	push %di
1:	stosb			/* the rest of the sector is zero */
	cmpw $0x8200, %di
	jb 1b
	pop %di
	movb drive, %dl
	movw $0x4300, %ax	/* extended write */
	movw $packet, %si
	int $0x13
	movw $wrong, %si
	jc told
	movw $saved, %si
	call print
	movw $saved, %si
	call serial
	xorb %al, %al
	stosb
	movw $0x8000, %si
	call serial
	movw $end, %si
told:
	call serial
	jmp prompt

print:	lodsb
	testb %al, %al
	jz 1f
	call put
	jmp print
1:	ret

put:	movb $0x0e, %ah
	movw $0x0007, %bx
	int $0x10
	ret

serial:	lodsb
	testb %al, %al
	jz 2f
	movb %al, %ah
	movw $0x3fd, %dx
1:	inb %dx, %al
	testb $0x20, %al
	jz 1b
	movw $0x3f8, %dx
	movb %ah, %al
	outb %al, %dx
	jmp serial
2:	ret

booted:	.asciz "tiny: booted\r\n"
asking:	.asciz "\r\ntiny> "
saved:	.asciz "\r\nsaved: "
wrong:	.asciz "\r\nwrong\r\n"
end:	.asciz ";\r\n"
drive:	.byte 0
	.balign 4
packet:	.byte 16, 0
	.word 1			/* sectors */
	.word 0x8000, 0		/* from */
	.quad 1			/* to the second */
	.org 446		/* where others have a partition table */
	.fill 64, 1, 0
	.word 0xaa55
