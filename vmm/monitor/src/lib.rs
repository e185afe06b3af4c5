//! The monitor: a hypervisor of about a thousand lines that runs inside the guest, at CPL 3, in the same address space
//! as the kernel that it serves. KVM hosts without VMX or SVM run only CPL 3 natively. A Linux kernel that starts
//! through its Xen PV entry runs entirely at CPL 3 and uses hypercalls for privileged operations. The monitor
//! implements them.
//!
//! It owns the state of the one vCPU ([`state`]) and is entered by system call, near call, exception or interrupt
//! ([`entry`]). It isolates nothing: it is guest code, and the VM is the only boundary. Invariants: no blocking loop;
//! no use of vector or x87 registers, which hold guest state; no Rust panic on a path that a guest can reach twice.
#![cfg_attr(not(test), no_std)]

pub mod layout;

mod debugreg;
mod emulate;
mod entry;
mod events;
mod exceptions;
mod gate;
mod hypercall;
mod log;
mod operand;
mod pagefault;
mod pagetable;
mod state;
mod timer;

#[cfg(monitor_image)]
mod freestanding;
