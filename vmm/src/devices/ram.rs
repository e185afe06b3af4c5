//! The type of guest memory that the devices access.

/// Guest memory.
#[cfg(not(fuzzing))]
pub type Ram = vm_memory::GuestMemoryMmap<()>;
/// Guest memory that a simulated second vCPU changes between two accesses.
#[cfg(fuzzing)]
pub type Ram = super::fuzz::Contested;
