//! All vCPUs except vCPU 0, each on its own thread. The machine's thread owns the devices, so each of these threads
//! hands its vCPU's register writes to the machine's thread and waits until the write has been handled.
//!
//! ```text
//!           ┌──────── goal Run ────────┐
//!        Parked ◄── exit, goal Park ── InGuest ── register write ──► Waiting ── served ──► Parked or InGuest
//! ```
//! A thread that waits for its write is out of the guest: it does not delay a pause, and its write becomes part of a
//! snapshot. Invariant: no vCPU is in the guest after [`Secondaries::pause`] has returned.

use std::{
    collections::VecDeque,
    os::unix::thread::JoinHandleExt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use kvm_ioctls::VcpuFd;
use nix::sys::{
    pthread::{Pthread, pthread_kill, pthread_self},
    signal::{SigSet, Signal},
};
use vmm_sys_util::signal::register_signal_handler;

use super::{
    error::HvmError,
    ports::SharedPorts,
    step::{Step, step},
    write::Write,
};
use crate::platform::{EndReason, Exit};

/// Signal that takes a secondary vCPU out of the guest.
const LEAVE: Signal = Signal::SIGUSR1;
/// Interval at which the signal is repeated: it has no effect if it arrives just before the vCPU enters the guest.
const INSIST: Duration = Duration::from_millis(1);

/// Handler of the signal. Its delivery alone ends KVM_RUN.
extern "C" fn nothing(_: i32, _: *mut nix::libc::siginfo_t, _: *mut nix::libc::c_void) {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    Park,
    Run,
}

#[derive(Debug)]
struct State {
    goal: Goal,
    /// Number of threads whose vCPU is in the guest or about to enter it.
    in_guest: usize,
    writes: VecDeque<Write>,
    /// Number of writes ever queued. `served` counts the ones that were handled.
    asked: u64,
    served: u64,
    end: Option<EndReason>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    owner: Pthread,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the owner check the state: its vCPU leaves the guest or does not enter it.
    fn kick_owner(&self) {
        // The owner's thread lives as long as the process.
        let _ = pthread_kill(self.owner, Signal::SIGIO);
    }

    fn enter(&self) {
        let mut state = self.lock();
        while state.goal == Goal::Park {
            state = self.wait(state);
        }
        state.in_guest += 1;
    }

    fn leave(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.in_guest -= 1;
        self.changed.notify_all();
        state
    }

    fn hand_over(&self, write: Write) {
        let mut state = self.leave();
        state.writes.push_back(write);
        state.asked += 1;
        let ticket = state.asked;
        self.kick_owner();
        while state.served < ticket {
            state = self.wait(state);
        }
    }

    fn end(&self, reason: EndReason) {
        let mut state = self.leave();
        state.goal = Goal::Park;
        state.end = Some(reason);
        self.kick_owner();
    }
}

/// Locks a mutex even if a thread panicked while it held the lock: a panic leaves no inconsistent state behind.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    vcpus: Vec<Arc<Mutex<VcpuFd>>>,
    threads: Vec<JoinHandle<()>>,
    parked: bool,
    /// The machine is handling the first write of the queue.
    handed_out: bool,
}

/// The secondary vCPUs; `None` for a VM with one vCPU.
#[derive(Debug, Default)]
pub(super) struct Secondaries(Option<Running>);

impl Secondaries {
    /// Starts the threads, parked. `writes` are the pending writes of a snapshot.
    pub(super) fn start(
        &mut self,
        vcpus: Vec<VcpuFd>,
        writes: Vec<Write>,
        ports: &SharedPorts,
    ) -> Result<(), HvmError> {
        if vcpus.is_empty() {
            return Ok(());
        }
        register_signal_handler(LEAVE as i32, nothing)
            .map_err(|e| HvmError::Resource("a signal handler", e.into()))?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                goal: Goal::Park,
                in_guest: 0,
                asked: writes.len() as u64,
                writes: writes.into(),
                served: 0,
                end: None,
            }),
            changed: Condvar::new(),
            owner: pthread_self(),
        });
        let mut running = Running {
            shared,
            vcpus: Vec::new(),
            threads: Vec::new(),
            parked: true,
            handed_out: false,
        };
        for (id, vcpu) in (1..).zip(vcpus) {
            running.spawn(id, vcpu, ports)?;
        }
        self.0 = Some(running);
        Ok(())
    }

    /// Completes the write that [`Secondaries::next`] returned.
    pub(super) fn served(&mut self) {
        let Some(running) = &mut self.0 else { return };
        if std::mem::take(&mut running.handed_out) {
            let mut state = running.shared.lock();
            state.writes.pop_front();
            state.served += 1;
            running.shared.changed.notify_all();
        }
    }

    /// The next exit for the machine to handle.
    pub(super) fn next(&mut self) -> Option<Exit> {
        let running = self.0.as_mut()?;
        let mut state = running.shared.lock();
        if let Some(reason) = state.end.take() {
            return Some(Exit::Ended(reason));
        }
        let write = *state.writes.front()?;
        running.handed_out = true;
        Some(write.exit())
    }

    /// Lets the vCPUs enter the guest.
    pub(super) fn resume(&mut self) {
        let Some(running) = &mut self.0 else { return };
        if std::mem::take(&mut running.parked) {
            running.shared.lock().goal = Goal::Run;
            running.shared.changed.notify_all();
        }
    }

    /// Takes all secondary vCPUs out of the guest and waits until they have left it.
    pub(super) fn pause(&mut self) {
        let Some(running) = &mut self.0 else { return };
        running.parked = true;
        let mut state = running.shared.lock();
        state.goal = Goal::Park;
        while state.in_guest > 0 {
            for thread in &running.threads {
                // The threads live as long as the process.
                let _ = pthread_kill(thread.as_pthread_t(), LEAVE);
            }
            let waited = running.shared.changed.wait_timeout(state, INSIST);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The vCPUs. The VM must be paused: a thread holds the lock of its vCPU while the vCPU is in the guest.
    pub(super) fn vcpus(&self) -> &[Arc<Mutex<VcpuFd>>] {
        self.0.as_ref().map_or(&[], |running| &running.vcpus)
    }

    /// Writes that the machine has neither handled nor begun to handle.
    pub(super) fn waiting(&self) -> Vec<Write> {
        let Some(running) = &self.0 else {
            return Vec::new();
        };
        let state = running.shared.lock();
        let done = usize::from(running.handed_out);
        state.writes.iter().skip(done).copied().collect()
    }
}

impl Running {
    fn spawn(&mut self, id: usize, vcpu: VcpuFd, ports: &SharedPorts) -> Result<(), HvmError> {
        let vcpu = Arc::new(Mutex::new(vcpu));
        let (shared, ports) = (Arc::clone(&self.shared), Arc::clone(ports));
        let own = Arc::clone(&vcpu);
        let thread = thread::Builder::new()
            .name(format!("vcpu{id}"))
            .stack_size(256 << 10)
            .spawn(move || run(&shared, &own, &ports))
            .map_err(|e| HvmError::Resource("a thread", e))?;
        self.vcpus.push(vcpu);
        self.threads.push(thread);
        Ok(())
    }
}

/// Runs a vCPU for the life of the process. The thread stays parked after the guest has ended.
fn run(shared: &Shared, vcpu: &Mutex<VcpuFd>, ports: &SharedPorts) {
    // Blocks all signals except LEAVE: the kick and the alarm are for the owner of the devices.
    let mut others: SigSet = SigSet::all();
    others.remove(LEAVE);
    // Cannot fail: both signal sets are valid.
    let _ = others.thread_set_mask();
    loop {
        shared.enter();
        let left = step(&mut lock(vcpu), ports);
        match left {
            Step::Again | Step::Kicked => drop(shared.leave()),
            Step::Printed => {
                drop(shared.leave());
                shared.kick_owner();
            }
            Step::Write(write) => shared.hand_over(write),
            Step::Ended(reason) => shared.end(reason),
        }
    }
}
