//! The machine and its event loop.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use model::{StartPhase, Timeline, clock};
use vmm_control::{Failure, FailureKind, Reply, VmPhase};

use super::vm::Vm;
use crate::{
    agent::{AGENT_PORT, Progress},
    control::Control,
    error::MachineError,
    platform::Exit,
    sys,
    watch::{DeviceToken, Events, Token, Watch},
};

/// One VM and all parts that serve it.
#[derive(Debug)]
pub struct Machine {
    pub(super) watch: Watch,
    pub(super) control: Control,
    pub(super) vm: Option<Vm>,
    pub(super) timeline: Timeline,
    pub(super) exits: BTreeMap<&'static str, u64>,
    /// Time until which the halted guest has no work, in nanoseconds of CLOCK_MONOTONIC. `u64::MAX` without a timer.
    /// `None` while its vCPU runs.
    pub(super) idle_until_ns: Option<u64>,
    pub(super) stop: bool,
}

impl Machine {
    /// Creates a machine that serves `control` and has no VM yet. `started_ns` is the monotonic time at which the
    /// process started.
    ///
    /// # Errors
    /// Returns [`MachineError`] if the signal handlers or the epoll set cannot be created, or `control` cannot be
    /// watched.
    pub fn new(mut control: Control, started_ns: u64) -> Result<Self, MachineError> {
        sys::install_kick().map_err(MachineError::Signals)?;
        let mut watch = Watch::new().map_err(MachineError::Watch)?;
        control.attach(&mut watch).map_err(MachineError::Watch)?;
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::ProcessStarted, started_ns);
        timeline.stamp(StartPhase::Jailed, clock::monotonic_ns());
        Ok(Self {
            watch,
            control,
            vm: None,
            timeline,
            exits: BTreeMap::new(),
            idle_until_ns: None,
            stop: false,
        })
    }

    /// Serves until a client sends `Shutdown` or the client of a connected control socket closes it.
    ///
    /// # Errors
    /// Returns an error if the control socket, the epoll set or the platform fails outside of a request. An error of a
    /// request becomes its reply. With a listening control socket, returns [`MachineError::Exited`] when the guest
    /// ends, because there may be no client to receive the reason.
    pub fn serve(mut self) -> Result<(), MachineError> {
        let mut events = Events::default();
        while !self.stop {
            self.idle_until_ns = None;
            let wait = match self.running() {
                Some(vm) => {
                    let exit = vm.platform.run()?;
                    self.after(exit)?
                }
                None => Wait::For(None),
            };
            match wait {
                Wait::No => {}
                Wait::Poll => self.poll(&mut events, Some(Duration::ZERO)).map(|_| ())?,
                Wait::For(timeout) => self.idle(&mut events, timeout)?,
            }
        }
        Ok(())
    }

    fn running(&mut self) -> Option<&mut Vm> {
        self.vm.as_mut().filter(|vm| vm.phase == VmPhase::Running)
    }

    fn count(&mut self, name: &'static str) {
        *self.exits.entry(name).or_default() += 1;
    }

    /// Handles an exit. Returns how to wait before the next run.
    fn after(&mut self, exit: Exit) -> Result<Wait, MachineError> {
        let Some(vm) = &mut self.vm else {
            return Ok(Wait::No);
        };
        match exit {
            Exit::DeviceWrite { offset, bytes, len } => {
                let ram = &vm.platform.memory().ram;
                let raised = vm.bus.write(offset, &bytes[..len], ram, &mut self.watch);
                vm.show_registers();
                vm.platform.raise(raised)?;
                self.count("device_write");
                Ok(Wait::No)
            }
            Exit::Resume => {
                vm.drain_console()?;
                vm.platform.clear_kick();
                self.count("resume");
                Ok(Wait::Poll)
            }
            Exit::Memory => {
                self.count("memory");
                Ok(Wait::No)
            }
            Exit::Idle(timeout) => {
                vm.drain_console()?;
                self.count("idle");
                let until = |left| clock::monotonic_ns().saturating_add(clock::nanoseconds(left));
                self.idle_until_ns = Some(timeout.map_or(u64::MAX, until));
                Ok(Wait::For(timeout))
            }
            Exit::Ended(reason) => {
                vm.drain_console()?;
                vm.bus.hang_up(&mut self.watch);
                vm.phase = VmPhase::Exited;
                self.count("ended");
                self.fail_identity(FailureKind::GuestExited, &reason.to_string())?;
                if self.control.is_listening() {
                    return Err(MachineError::Exited(Some(reason)));
                }
                if let Some(vm) = &mut self.vm {
                    vm.end = Some(reason);
                }
                Ok(Wait::No)
            }
        }
    }

    /// Serves descriptors until an interrupt is raised for the idle guest, the guest's timer is due, the VM starts or
    /// stops running, or the process must exit.
    fn idle(&mut self, events: &mut Events, timeout: Option<Duration>) -> Result<(), MachineError> {
        let guest_due = timeout.map(|t| Instant::now() + t);
        let idle_vm = self.running().is_some();
        loop {
            let task_due = self
                .vm
                .as_ref()
                .and_then(|vm| Some(vm.identity.as_ref()?.due()));
            let due = [guest_due, task_due].into_iter().flatten().min();
            let left = due.map(|at| at.saturating_duration_since(Instant::now()));
            let raised = self.poll(events, left)?;
            let over = guest_due.is_some_and(|at| Instant::now() >= at);
            if raised || over || self.stop || self.running().is_some() != idle_vm {
                return Ok(());
            }
        }
    }

    /// Waits up to `timeout` and serves ready descriptors. Returns whether the guest got an interrupt.
    ///
    /// A client may have sent its request before it was accepted, and a descriptor that is ready when it is first
    /// watched sends no signal. The control socket is therefore read until it is empty: a guest that never halts would
    /// give no other opportunity.
    fn poll(
        &mut self,
        events: &mut Events,
        timeout: Option<Duration>,
    ) -> Result<bool, MachineError> {
        let mut raised = false;
        let mut wait = timeout;
        loop {
            self.watch.wait(events, wait).map_err(MachineError::Watch)?;
            let mut is_served = true;
            for token in events.tokens() {
                match token {
                    Token::ControlClient => {
                        self.request()?;
                        is_served = false;
                    }
                    Token::ControlListener => {
                        self.control
                            .accept(&mut self.watch)
                            .map_err(MachineError::Watch)?;
                        is_served = false;
                    }
                    Token::Agent => {}
                    Token::Device(token) => raised |= self.device_ready(token)?,
                }
            }
            raised |= self.step_identity()?;
            if is_served || self.stop {
                return Ok(raised);
            }
            wait = Some(Duration::ZERO);
        }
    }

    fn device_ready(&mut self, token: DeviceToken) -> Result<bool, MachineError> {
        let Some(vm) = &mut self.vm else {
            return Ok(false);
        };
        let raised = vm
            .bus
            .ready(token, &vm.platform.memory().ram, &mut self.watch);
        if vm.phase == VmPhase::Exited {
            // A client connects to a guest that has ended.
            vm.bus.hang_up(&mut self.watch);
        }
        vm.show_registers();
        vm.platform.raise(raised)?;
        Ok(raised.0 != 0)
    }

    fn step_identity(&mut self) -> Result<bool, MachineError> {
        let Some(vm) = &mut self.vm else {
            return Ok(false);
        };
        let Some(task) = &mut vm.identity else {
            return Ok(false);
        };
        let (progress, stream) = task
            .step(Instant::now(), &mut self.watch)
            .map_err(MachineError::Watch)?;
        let mut raised = false;
        if let Some(stream) = stream {
            let ram = &vm.platform.memory().ram;
            let interrupts = vm
                .bus
                .connect_guest(AGENT_PORT, stream, ram, &mut self.watch);
            vm.platform.raise(interrupts)?;
            raised = interrupts.0 != 0;
        }
        match progress {
            Progress::Waiting => {}
            Progress::Ready => {
                vm.identity = None;
                sys::alarm(Duration::ZERO);
                self.timeline
                    .stamp(StartPhase::AgentReady, clock::monotonic_ns());
                self.reply(&Ok(Reply::Started(self.timeline.clone())))?;
            }
            Progress::Failed(why) => self.fail_identity(FailureKind::AgentUnready, &why)?,
        }
        Ok(raised)
    }

    fn fail_identity(&mut self, kind: FailureKind, why: &str) -> Result<(), MachineError> {
        let task = self.vm.as_mut().and_then(|vm| vm.identity.take());
        if task.is_none() {
            return Ok(());
        }
        sys::alarm(Duration::ZERO);
        self.reply(&Err(Failure {
            kind,
            message: why.to_owned(),
        }))
    }

    pub(super) fn reply(&mut self, answer: &Result<Reply, Failure>) -> Result<(), MachineError> {
        let sent = self.control.reply(answer, &mut self.watch);
        sent.map_err(MachineError::Control)
    }
}

enum Wait {
    No,
    Poll,
    For(Option<Duration>),
}
