//! Errors of the platform.

use super::domain::DomainError;
use crate::memory::MemoryError;

/// Why the platform could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Ring3Error {
    /// KVM refused a step.
    #[error("KVM refused to {step}")]
    Kvm {
        /// What was tried.
        step: &'static str,
        /// The cause.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel or the initrd.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// Guest memory could not be read or written where the platform keeps its own data.
    #[error("the monitor's memory is out of reach")]
    Region(#[source] vm_memory::GuestMemoryError),
    /// Which memory the guest has touched cannot be told.
    #[error("cannot tell which memory the guest has touched")]
    Touched(#[source] std::io::Error),
    /// An eventfd could not be made.
    #[error("cannot make an eventfd")]
    EventFd(#[source] std::io::Error),
    /// Saved state that no VM can have been in.
    #[error("the saved state is impossible: {0}")]
    State(&'static str),
}

pub(super) fn kvm(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Ring3Error {
    move |source| Ring3Error::Kvm { step, source }
}
