//! The monitor: a hypervisor of a thousand lines that lives in the guest, at CPL 3, beside the kernel it
//! serves. KVM hosts without VMX or SVM run only CPL 3 natively; a Linux entered through its Xen PV entry
//! runs wholly at CPL 3 and asks its hypervisor for what it may not do. The monitor answers.
//!
//! It owns the state of the one vCPU ([`state`]) and is entered by system call, by near call, by exception
//! and by interrupt ([`entry`]). It protects the guest from nothing and the host from nothing: it *is* guest
//! code, and the VM boundary is the only boundary. What must never happen: a blocking loop, a use of SSE
//! registers (the guest's are live), a Rust panic on a path that a guest can reach twice.
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
mod pagefault;
mod pagetable;
mod state;
mod timer;

#[cfg(monitor_image)]
mod freestanding;
