//! What can go wrong in a machine, and what a caller of the control socket can do about it.

use std::{io, path::PathBuf};

use model::chain;
use vmm_control::{Failure, FailureKind, frame::FrameError};

use crate::{
    devices::DeviceError,
    memory::MemoryError,
    platform::{EndReason, PlatformError, hvm::HvmError, ring3::Ring3Error},
    snapshot::SnapshotError,
};

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// No KVM, or what was handed over as /dev/kvm is not it.
    #[error("cannot use /dev/kvm (is KVM enabled, and may this user open it?)")]
    NoKvm(#[source] io::Error),
    /// A descriptor that was handed over.
    #[error("cannot use a descriptor that was handed over")]
    Descriptor(#[source] io::Error),
    /// Signal handlers.
    #[error("cannot install a signal handler")]
    Signals(#[source] io::Error),
    /// Waiting for descriptors.
    #[error("cannot watch descriptors")]
    Watch(#[source] io::Error),
    /// The control socket.
    #[error("the control socket broke")]
    Control(#[source] FrameError),
    /// A file of the spec.
    #[error("cannot open {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The spec.
    #[error(transparent)]
    Spec(#[from] model::SpecError),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The platform.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// No platform.
    #[error("no VM can run here: {0}")]
    Unsuitable(String),
    /// The devices.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A template.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Not now.
    #[error("{0}")]
    WrongPhase(&'static str),
    /// The guest is over.
    #[error("the guest is over: {}", .0.as_ref().map_or_else(String::new, ToString::to_string))]
    Exited(Option<EndReason>),
}

impl MachineError {
    /// As the control socket carries it: what to act on, and the chain of causes in one line.
    #[must_use]
    pub fn failure(&self) -> Failure {
        Failure {
            kind: self.kind(),
            message: chain(self),
        }
    }

    fn kind(&self) -> FailureKind {
        match self {
            Self::NoKvm(_) | Self::Unsuitable(_) => FailureKind::UnsuitableHost,
            Self::Spec(_) | Self::Open { .. } => FailureKind::BadSpec,
            Self::Snapshot(e) if e.is_no_space() => FailureKind::NoSpace,
            Self::Snapshot(_) => FailureKind::BadSnapshot,
            Self::Device(DeviceError::State(_)) => FailureKind::BadSnapshot,
            Self::Device(_) => FailureKind::BadSpec,
            Self::Platform(PlatformError::Ring3(e)) => ring3_kind(e),
            Self::Platform(PlatformError::Hvm(e)) => hvm_kind(e),
            Self::WrongPhase(_) => FailureKind::WrongPhase,
            Self::Exited(_) => FailureKind::GuestExited,
            Self::Memory(_)
            | Self::Signals(_)
            | Self::Watch(_)
            | Self::Control(_)
            | Self::Descriptor(_) => FailureKind::Io,
        }
    }
}

fn ring3_kind(error: &Ring3Error) -> FailureKind {
    match error {
        Ring3Error::State(_) => FailureKind::BadSnapshot,
        Ring3Error::Domain(_) => FailureKind::BadSpec,
        Ring3Error::Kvm { .. }
        | Ring3Error::Memory(_)
        | Ring3Error::Region(_)
        | Ring3Error::Touched(_)
        | Ring3Error::EventFd(_) => FailureKind::Io,
    }
}

fn hvm_kind(error: &HvmError) -> FailureKind {
    match error {
        HvmError::State(_) | HvmError::Missing(_) => FailureKind::BadSnapshot,
        HvmError::Kernel(_) | HvmError::Boot(..) | HvmError::Room(_) => FailureKind::BadSpec,
        HvmError::Kvm { .. } | HvmError::Memory(_) | HvmError::Resource(..) => FailureKind::Io,
    }
}
