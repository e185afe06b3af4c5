//! The `ring3` platform: the guest kernel runs at CPL 3 through its Xen PV entry, and the monitor serves its
//! hypercalls.
//!
//! Guest-physical memory is RAM, followed by the monitor's region (see [`monitor::layout`]). A booted VM has KVM slots
//! for all memory; a clone begins with slots for a part of it and adds others when it touches them ([`slots`]). Above
//! memory is the register page of the devices, a read-only slot: a read does not leave the guest, a write does, except
//! for interrupt acknowledgements, which an ioeventfd absorbs.

mod boot_files;
mod clock;
mod error;
mod region;
mod run;
mod save;
mod state;
mod vm;

mod cpu;
mod domain;
pub(crate) mod elf;
mod gate;
mod image;
mod slots;
mod tables;
mod text;

pub use boot_files::BootFiles;
pub use cpu::CpuState;
pub use domain::DomainError;
pub use elf::ElfError;
pub use error::Ring3Error;
pub use state::Ring3State;
pub use vm::Ring3;
