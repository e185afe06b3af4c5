//! One stay of a vCPU in the guest.

use kvm_ioctls::{VcpuExit, VcpuFd};

use super::map::REGISTERS;
use super::ports::{self, Outcome, SharedPorts};
use super::write::Write;
use crate::{devices::PAGE_BYTES, platform::EndReason};

/// The result of one vCPU exit.
pub(super) enum Step {
    Again,
    Kicked,
    /// The console output has a complete line.
    Printed,
    Write(Write),
    Ended(EndReason),
}

/// Runs a vCPU until one exit. Port accesses are handled here, on any thread; device writes are not.
pub(super) fn step(vcpu: &mut VcpuFd, ports: &SharedPorts) -> Step {
    const END: u64 = REGISTERS + PAGE_BYTES as u64;
    match vcpu.run() {
        Ok(VcpuExit::MmioWrite(at @ REGISTERS..END, data)) => {
            Step::Write(Write::new(at - REGISTERS, data))
        }
        // Other addresses have no device: writes are ignored, reads return ones.
        Ok(VcpuExit::MmioWrite(..)) => Step::Again,
        Ok(VcpuExit::MmioRead(_, data)) => {
            data.fill(0xff);
            Step::Again
        }
        Ok(VcpuExit::IoIn(port, data)) => {
            ports::lock(ports).read(port, data);
            Step::Again
        }
        Ok(VcpuExit::IoOut(port, data)) => match ports::lock(ports).write(port, data) {
            Outcome::Nothing => Step::Again,
            Outcome::Line => Step::Printed,
            Outcome::Ended(reason) => Step::Ended(reason),
        },
        Ok(VcpuExit::Intr) => Step::Kicked,
        // A triple fault.
        Ok(VcpuExit::Shutdown) => Step::Ended(EndReason::Crash),
        Ok(other) => Step::Ended(EndReason::Failed(format!(
            "KVM stopped the guest: {other:?}"
        ))),
        Err(e) if [nix::libc::EINTR, nix::libc::EAGAIN].contains(&e.errno()) => Step::Kicked,
        Err(e) => Step::Ended(EndReason::Failed(format!("KVM cannot run the guest: {e}"))),
    }
}
