//! Errors of the platform.

use super::domain::DomainError;
use crate::memory::MemoryError;

/// Reasons why a step of the platform failed.
#[derive(Debug, thiserror::Error)]
pub enum Ring3Error {
    #[error("KVM refused to {step}")]
    Kvm {
        step: &'static str,
        #[source]
        source: kvm_ioctls::Error,
    },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// The monitor's region or the shared page could not be accessed.
    #[error("cannot access the monitor's region in guest memory")]
    Region(#[source] vm_memory::GuestMemoryError),
    #[error("cannot determine which memory the guest has touched")]
    Touched(#[source] std::io::Error),
    #[error("cannot create an eventfd")]
    EventFd(#[source] std::io::Error),
    /// Names of features.
    #[error("the CPU lacks features that the template uses: {0}")]
    Features(String),
    /// No VM can have saved this state.
    #[error("the saved state is invalid: {0}")]
    State(&'static str),
}

pub(super) fn kvm(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Ring3Error {
    move |source| Ring3Error::Kvm { step, source }
}
