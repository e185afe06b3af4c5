//! The `ring3` platform: the guest kernel runs at CPL 3 through its Xen PV entry, served by the monitor.
//!
//! Guest-physical memory is RAM, then the monitor's region (see `monitor::layout`); KVM knows all of it, or what
//! a clone has touched so far (`slots`). Above it is the register page of the devices, a read-only slot: reads never
//! leave the guest, writes do, except interrupt acknowledgements, which an ioeventfd swallows.

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
