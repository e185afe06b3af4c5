//! Errors of the machine, and the failure kinds that a client of the control socket receives.

use std::{io, path::PathBuf};

use model::chain;
use vmm_control::{Failure, FailureKind, frame::FrameError};

use crate::{
    devices::DeviceError,
    memory::MemoryError,
    platform::{EndReason, PlatformError, hvm::HvmError, ring3::Ring3Error},
    snapshot::SnapshotError,
};

/// Reasons for which the machine refused a request or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// There is no KVM, or the client's descriptor for /dev/kvm refers to a different file.
    #[error("cannot use /dev/kvm (is KVM enabled, and may this user open it?)")]
    NoKvm(#[source] io::Error),
    #[error("cannot use a descriptor that the client sent")]
    Descriptor(#[source] io::Error),
    #[error("cannot install a signal handler")]
    Signals(#[source] io::Error),
    #[error("cannot wait for descriptors with epoll")]
    Watch(#[source] io::Error),
    #[error("the control socket failed")]
    Control(#[source] FrameError),
    #[error("cannot open {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Spec(#[from] model::SpecError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// KVM on this host fits neither platform.
    #[error("this host cannot run a VM: {0}")]
    Unsuitable(String),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The request is not possible in the VM's phase.
    #[error("{0}")]
    WrongPhase(&'static str),
    /// The guest has ended.
    #[error("the guest has ended: {}", .0.as_ref().map_or_else(String::new, ToString::to_string))]
    Exited(Option<EndReason>),
}

impl MachineError {
    /// The reply for the control socket: the kind, and the error with its causes in one line.
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
        Ring3Error::State(_) | Ring3Error::Features(_) => FailureKind::BadSnapshot,
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
        HvmError::State(_) | HvmError::Missing { .. } => FailureKind::BadSnapshot,
        HvmError::Kernel(_) | HvmError::Boot(..) | HvmError::Room(_) => FailureKind::BadSpec,
        HvmError::Kvm { .. } | HvmError::Memory(_) | HvmError::Resource(..) => FailureKind::Io,
    }
}
