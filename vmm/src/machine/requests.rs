//! Requests of the control socket.

use std::time::{Duration, Instant};

use model::{Identity, StartPhase, clock};
use vmm_control::{Reply, Request, VmPhase, VmStats, files::Files};

use super::event_loop::Machine;
use super::vm::Vm;
use crate::{agent::IdentityTask, control::Received, error::MachineError, sys};

/// Interval at which a running guest is interrupted while an identity is pending, so that its deadline is checked.
const ALARM: Duration = Duration::from_millis(10);

impl Machine {
    pub(super) fn request(&mut self) -> Result<(), MachineError> {
        let received = self.control.receive(&mut self.watch);
        let (request, files) = match received.map_err(MachineError::Control)? {
            Received::Request(request, files) => (*request, files),
            Received::Invalid(failure) => return self.reply(&Err(failure)),
            Received::Refused => return Ok(()),
            Received::Left => {
                // The client that requested the identity has disconnected or was dropped.
                if let Some(vm) = self.vm.as_mut().filter(|vm| vm.identity.is_some()) {
                    vm.identity = None;
                    sys::alarm(Duration::ZERO);
                }
                return Ok(());
            }
            Received::End => {
                self.stop = true;
                return Ok(());
            }
        };
        let answer = match request {
            Request::Identity {
                identity,
                within_ms,
            } => match self.begin_identity(identity, within_ms) {
                Ok(()) => return Ok(()),
                Err(e) => Err(e),
            },
            other => self.act(other, files),
        };
        self.reply(&answer.map_err(|e| e.failure()))
    }

    fn act(&mut self, request: Request, mut files: Files) -> Result<Reply, MachineError> {
        match request {
            Request::Boot(spec) => self.build(|this| this.boot(&spec, files)),
            Request::Restore { spec, home } => self.build(|this| this.restore(&spec, &home, files)),
            Request::Pause => self.set_phase(VmPhase::Paused),
            Request::Resume => self.set_phase(VmPhase::Running),
            Request::Snapshot { content } => self.snapshot(content, &mut files),
            Request::SaveLayer => self.save_layer(&mut files),
            Request::RecordWorkingSet => self.record_working_set(&mut files),
            Request::Stats => Ok(Reply::Stats(self.stats())),
            Request::Shutdown => {
                self.stop = true;
                Ok(Reply::Done)
            }
            Request::Identity { .. } => Err(MachineError::WrongPhase("identity is handled apart")),
        }
    }

    pub(super) fn need_vm(&mut self) -> Result<&mut Vm, MachineError> {
        self.vm
            .as_mut()
            .ok_or(MachineError::WrongPhase("this process has no VM yet"))
    }

    pub(super) fn need_empty(&self) -> Result<(), MachineError> {
        match self.vm {
            None => Ok(()),
            Some(_) => Err(MachineError::WrongPhase("this process already has a VM")),
        }
    }

    pub(super) fn stamp(&mut self, phase: StartPhase) {
        self.timeline.stamp(phase, clock::monotonic_ns());
    }

    pub(super) fn set_phase(&mut self, to: VmPhase) -> Result<Reply, MachineError> {
        let vm = self.need_vm()?;
        if vm.phase == VmPhase::Exited {
            return Err(MachineError::Exited(vm.end.clone()));
        }
        match (vm.phase, to) {
            (VmPhase::Running, VmPhase::Paused) => vm.platform.pause()?,
            (VmPhase::Paused, VmPhase::Running) => vm.platform.resume()?,
            _ => {}
        }
        vm.phase = to;
        if to == VmPhase::Running && self.timeline.at(StartPhase::Resumed).is_none() {
            self.stamp(StartPhase::Resumed);
        }
        Ok(Reply::Done)
    }

    fn begin_identity(&mut self, identity: Identity, within_ms: u64) -> Result<(), MachineError> {
        let vm = self.need_vm()?;
        match vm.phase {
            VmPhase::Running if vm.identity.is_none() => {}
            VmPhase::Exited => return Err(MachineError::Exited(vm.end.clone())),
            _ => {
                return Err(MachineError::WrongPhase(
                    "the VM is not running, or an identity is already pending",
                ));
            }
        }
        let within = Duration::from_millis(within_ms.min(3_600_000));
        vm.identity = Some(IdentityTask::new(identity, within, Instant::now()));
        sys::alarm(ALARM);
        Ok(())
    }

    fn stats(&self) -> VmStats {
        let vm = self.vm.as_ref();
        VmStats {
            phase: vm.map_or(VmPhase::Empty, |vm| vm.phase),
            exit_reason: vm.and_then(|vm| Some(vm.end.as_ref()?.to_string())),
            timeline: self.timeline.clone(),
            exits: self
                .exits
                .iter()
                .map(|(k, v)| ((*k).to_owned(), *v))
                .collect(),
            idle_ns: self.idle_until_ns.map(|until| match until {
                u64::MAX => until,
                _ => until.saturating_sub(clock::monotonic_ns()),
            }),
            guest_private_bytes: vm
                .and_then(|vm| vm.platform.memory().private_ranges().ok())
                .map(|ranges| ranges.iter().map(|(_, n)| n).sum()),
            lost_frames: vm.map(|vm| vm.bus.lost_frames()).unwrap_or_default(),
            unknown_events: self.watch.unknown_events(),
        }
    }
}
