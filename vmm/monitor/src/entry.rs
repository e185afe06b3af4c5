//! Entry to and exit from the monitor, in assembly.
//!
//! Entry: `syscall` from user mode (a system call, which is passed to the kernel at once), `syscall` from kernel mode
//! or a near call (a hypercall), an exception (IST 1), or an interrupt (IST 2, which clears the virtual IF). Exit: to
//! the guest by `iretq`, with the [`Frame`](crate::state::Frame) on the exception stack, whose address never changes;
//! from a hypercall by `ret`.
//!
//! An event that becomes pending between the last check and the return would be delayed until the next entry. Therefore
//! the code from the check to the return is a *window*: it changes no memory and can be restarted at any point, and the
//! interrupt handler moves an interrupted window back to its start. Interrupts in other monitor code only mark the
//! event pending.
//!
//! An interrupt clears the virtual IF, which ring 3 cannot set. Therefore the interrupt path returns through the gate,
//! whose `iretq` at CPL 0 can. The gate is an interrupt gate itself, so nothing nests on IST 2.

use core::arch::global_asm;

use crate::layout::{EVENT_VECTOR, HEADER_MAGIC, STUB_BYTES, TIMER_VECTOR, USER_CS, USER_SS};

global_asm!(
    r#"
    .section .header, "a"
    .global monitor_header
monitor_header:
    .quad {magic}
    .quad monitor_syscall
    .quad monitor_hypercall
    .quad monitor_iret
    .quad monitor_exceptions
    .quad monitor_interrupt
    .quad monitor_gate
    .quad monitor_exception_top
    .quad monitor_interrupt_top
    .quad monitor_gate_top

    .section .bss
    .balign 4096
    .skip 16384
monitor_exception_top:
    .skip 8192
monitor_interrupt_top:
    .skip 16384
monitor_hypercall_top:
    .skip 4096
monitor_gate_top:

    .set FRAME, monitor_exception_top - 176
    .set IRQ_FRAME, monitor_interrupt_top - 176
    .set USER_MODE, MONITOR_ENTRY + 0
    .set SAVED_RSP, MONITOR_ENTRY + 8
    .set HYPERCALL_RSP, MONITOR_ENTRY + 16
    .set KERNEL_SP, MONITOR_ENTRY + 24
    .set USER_GS, MONITOR_ENTRY + 32
    .set KERNEL_GS, MONITOR_ENTRY + 40
    .set VCPU_INFO, MONITOR_ENTRY + 48
    .set SYSCALL_TARGET, MONITOR_ENTRY + 56
    .set LAST_WRITE_FAULT, MONITOR_ENTRY + 64

    // Arguments: where the guest's rcx, rax and r11 are.
    .macro PUSH_REGISTERS its_rcx=rcx, its_rax=rax, its_r11=r11
    push rdi
    push rsi
    push rdx
    push \its_rcx
    push \its_rax
    push r8
    push r9
    push r10
    push \its_r11
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    .endm

    .macro LOAD_REGISTERS
    mov r15, [rsp]
    mov r14, [rsp + 8]
    mov r13, [rsp + 16]
    mov r12, [rsp + 24]
    mov rbp, [rsp + 32]
    mov rbx, [rsp + 40]
    mov r11, [rsp + 48]
    mov r10, [rsp + 56]
    mov r9, [rsp + 64]
    mov r8, [rsp + 72]
    mov rax, [rsp + 80]
    mov rcx, [rsp + 88]
    mov rdx, [rsp + 96]
    mov rsi, [rsp + 104]
    mov rdi, [rsp + 112]
    .endm

    .section .text
    .global monitor_syscall
monitor_syscall:
    mov [rip + SAVED_RSP], rsp
    cmp qword ptr [rip + USER_MODE], 0
    jne 2f
    cmp eax, 23
    jne monitor_hypercall
    // The kernel has pushed flags, rcx, r11 and rax. Reduce the stack to what the near call leaves.
    mov rax, [rsp]
    mov r11, [rsp + 8]
    mov rcx, [rsp + 16]
    lea rsp, [rsp + 32]
    push rax
    jmp monitor_iret
2:  // A system call from user mode: push Xen's frame on the kernel's stack, with events masked.
    mov rsp, [rip + KERNEL_SP]
    or r11, 0x200
    push {user_ss}
    push qword ptr [rip + SAVED_RSP]
    push r11
    push {user_cs}
    push rcx
    push r11
    push rcx
    mov qword ptr [rip + USER_MODE], 0
    rdgsbase rcx
    mov [rip + USER_GS], rcx
    mov rcx, [rip + KERNEL_GS]
    wrgsbase rcx
    mov rcx, [rip + VCPU_INFO]
    mov byte ptr [rcx + 1], 1
    jmp qword ptr [rip + SYSCALL_TARGET]

    // rsp: r11, rcx, return address. rax: number; rdi, rsi, rdx, r10, r8: arguments. All of them are clobbered.
    .global monitor_hypercall
monitor_hypercall:
    mov [rip + HYPERCALL_RSP], rsp
    lea rsp, [rip + monitor_hypercall_top]
    push r9
    push rax
    mov rcx, r10
    mov r9, rax
    cld
    call monitor_hypercall_dispatch
    pop r9
    pop r9
    .global monitor_hypercall_window
monitor_hypercall_window:
    mov rcx, [rip + VCPU_INFO]
    movzx ecx, word ptr [rcx]
    test cl, cl
    jz 3f
    test ch, ch
    jz 4f
3:  mov rsp, [rip + HYPERCALL_RSP]
    pop r11
    pop rcx
    ret
    .global monitor_hypercall_window_end
monitor_hypercall_window_end:
4:  // An event is due: build a frame from the kernel's context and deliver the upcall first.
    mov rcx, [rip + HYPERCALL_RSP]
    lea rsp, [rip + monitor_exception_top]
    lea r11, [rcx + 24]
    push {user_ss}
    push r11
    push 0x202
    push {user_cs}
    push qword ptr [rcx + 16]
    push 0
    push 0
    PUSH_REGISTERS "qword ptr [rcx + 8]", rax, "qword ptr [rcx]"
    jmp monitor_exit_window

    // rsp: rax, rip, cs, rflags, rsp, ss. The other registers are returned unchanged.
    .global monitor_iret
monitor_iret:
    mov rax, rsp
    lea rsp, [rip + monitor_exception_top]
    push {user_ss}
    push qword ptr [rax + 32]
    push qword ptr [rax + 24]
    push {user_cs}
    push qword ptr [rax + 8]
    push 0
    push 0
    PUSH_REGISTERS rcx, "qword ptr [rax]", r11
    test byte ptr [rax + 16], 3
    jz 5f
    rdgsbase rcx
    mov [rip + KERNEL_GS], rcx
    mov rcx, [rip + USER_GS]
    wrgsbase rcx
    mov qword ptr [rip + USER_MODE], 1
    mov qword ptr [rip + LAST_WRITE_FAULT], 0
5:  bt dword ptr [rax + 24], 9
    setnc cl
    mov rdx, [rip + VCPU_INFO]
    mov byte ptr [rdx + 1], cl
    jmp monitor_exit_window

monitor_exception:
    PUSH_REGISTERS
    cld
    mov rdi, rsp
    call monitor_exception_dispatch
    .global monitor_exit_window
monitor_exit_window:
    lea rsp, [rip + FRAME]
    mov rcx, [rip + VCPU_INFO]
    movzx ecx, word ptr [rcx]
    test cl, cl
    jz 6f
    test ch, ch
    jz 7f
6:  LOAD_REGISTERS
    add rsp, 136
    iretq
    .global monitor_exit_window_end
monitor_exit_window_end:
7:  cld
    mov rdi, rsp
    call monitor_deliver_event
    jmp monitor_exit_window

    // The timer's stub follows the other stub at the distance STUB_BYTES, which the IDT's builder uses.
    .balign {stub_bytes}
    .global monitor_interrupt
monitor_interrupt:
    push 0
    push {event_vector}
    jmp 8f
    .balign {stub_bytes}
    push 0
    push {timer_vector}
8:  PUSH_REGISTERS
    cld
    mov rdi, rsp
    call monitor_interrupt_dispatch
    LOAD_REGISTERS
    or qword ptr [rsp + 152], 0x200
    lea r10, [rip + monitor_gate_interrupt_return]
    int 4

    // From here on the CPU is at CPL 0, and KVM emulates each instruction.
    .global monitor_gate
monitor_gate:
    jmp r10
monitor_gate_interrupt_return:
    mov r10, [rip + IRQ_FRAME + 56]
    lea rsp, [rip + IRQ_FRAME + 136]
    iretq
    .global monitor_gate_read_cr2
monitor_gate_read_cr2:
    mov rax, cr2
    iretq
    .global monitor_gate_write_cr3
monitor_gate_write_cr3:
    mov cr3, rax
    iretq
    .global monitor_gate_invlpg
monitor_gate_invlpg:
    invlpg [rax]
    iretq
    .global monitor_gate_wrmsr
monitor_gate_wrmsr:
    wrmsr
    iretq
    .global monitor_gate_out
monitor_gate_out:
    out dx, al
    iretq
    .global monitor_gate_read_dr6
monitor_gate_read_dr6:
    mov rax, dr6
    iretq
    .global monitor_gate_write_dr6
monitor_gate_write_dr6:
    mov dr6, rax
    iretq
    .global monitor_gate_write_dr7
monitor_gate_write_dr7:
    mov dr7, rax
    iretq
    .global monitor_gate_write_dr0
monitor_gate_write_dr0:
    mov dr0, rax
    iretq
    .global monitor_gate_write_dr1
monitor_gate_write_dr1:
    mov dr1, rax
    iretq
    .global monitor_gate_write_dr2
monitor_gate_write_dr2:
    mov dr2, rax
    iretq
    .global monitor_gate_write_dr3
monitor_gate_write_dr3:
    mov dr3, rax
    iretq

    .macro EXCEPTION n, has_error
    .balign 16
    .if \has_error == 0
    push 0
    .endif
    push \n
    jmp monitor_exception
    .endm
    .balign 16
    .global monitor_exceptions
monitor_exceptions:
    EXCEPTION 0, 0
    EXCEPTION 1, 0
    EXCEPTION 2, 0
    EXCEPTION 3, 0
    EXCEPTION 4, 0
    EXCEPTION 5, 0
    EXCEPTION 6, 0
    EXCEPTION 7, 0
    EXCEPTION 8, 1
    EXCEPTION 9, 0
    EXCEPTION 10, 1
    EXCEPTION 11, 1
    EXCEPTION 12, 1
    EXCEPTION 13, 1
    EXCEPTION 14, 1
    EXCEPTION 15, 0
    EXCEPTION 16, 0
    EXCEPTION 17, 1
    EXCEPTION 18, 0
    EXCEPTION 19, 0
    EXCEPTION 20, 0
    EXCEPTION 21, 1
    EXCEPTION 22, 0
    EXCEPTION 23, 0
    EXCEPTION 24, 0
    EXCEPTION 25, 0
    EXCEPTION 26, 0
    EXCEPTION 27, 0
    EXCEPTION 28, 0
    EXCEPTION 29, 1
    EXCEPTION 30, 1
    EXCEPTION 31, 0
    "#,
    magic = const HEADER_MAGIC,
    user_cs = const USER_CS,
    user_ss = const USER_SS,
    stub_bytes = const STUB_BYTES,
    event_vector = const EVENT_VECTOR,
    timer_vector = const TIMER_VECTOR,
);
