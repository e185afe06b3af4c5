//! Errors of the platform.

use crate::memory::MemoryError;

/// Reasons why a step of the platform failed.
#[derive(Debug, thiserror::Error)]
pub enum HvmError {
    #[error("KVM refused to {step}")]
    Kvm {
        step: &'static str,
        #[source]
        source: kvm_ioctls::Error,
    },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("cannot load the kernel")]
    Kernel(#[source] linux_loader::loader::Error),
    /// The initramfs cannot be read.
    #[error("cannot {0}")]
    Boot(&'static str, #[source] std::io::Error),
    /// Guest memory is too small for an object that the boot needs.
    #[error("guest memory has no room for {0}")]
    Room(&'static str),
    #[error("cannot create {0}")]
    Resource(&'static str, #[source] std::io::Error),
    /// No VM can have saved this state.
    #[error("the saved state is invalid: {0}")]
    State(&'static str),
    /// The state was saved on a CPU with different features.
    #[error(
        "this CPU ({host}) cannot run the template of another ({template}), it lacks: {}",
        missing.join(", ")
    )]
    Missing {
        template: String,
        host: String,
        missing: Vec<String>,
    },
}

pub(super) fn kvm(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> HvmError {
    move |source| HvmError::Kvm { step, source }
}
