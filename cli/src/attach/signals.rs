//! Signals of this program. They are blocked in all threads, and one thread waits for them. Signals that are
//! ignored when the program starts, for example by nohup(1), stay ignored.
//!
//! ```text
//! before the command runs   INT, TERM, HUP, QUIT: remembered; the main thread checks [`Signals::received`]
//! while it runs             forwarded to its process group; WINCH changes the size of its terminal
//! the second one, or GRACE after the first
//!                           the sandbox or the process is killed, and the program exits with 128+n
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use client::endpoint::Wire;
use envd::{
    ClientError, Empty, EnvdClient, ExecRequest, ProcessSelector, Pty, SendSignalRequest,
    Signal as AgentSignal, UpdateRequest,
};
use nix::sys::signal::{SigSet, Signal};

use super::{Order, Streams, status, terminal};
use crate::server::{SandboxRoute, Server, segment};

/// Time for a command to end after a signal.
const GRACE: Duration = Duration::from_secs(10);
/// The same signal within this time is not a repetition, because a sender may signal both a process and its group.
const SAME: Duration = Duration::from_millis(500);
/// Timeout of requests to the agent.
const ANSWER: Duration = Duration::from_secs(10);
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];
const OTHERS: [Signal; 3] = [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH];

/// Cleanup when a signal ends the program.
pub(crate) enum AtEnd {
    Nothing,
    /// The sandbox was created for this command.
    KillSandbox(Box<Server>, String),
    /// The sandbox outlives the command.
    KillProcess,
}

/// The process that receives signals.
#[derive(Clone)]
struct Target {
    route: SandboxRoute,
    pid: u32,
    user: Option<String>,
    streams: Streams,
}

struct State {
    at_end: AtEnd,
    target: Option<Target>,
    /// The first terminating signal, and when it arrived.
    first: Option<(Signal, Instant)>,
}

/// A handle to the signal thread.
#[derive(Clone)]
pub(crate) struct Signals(Arc<Mutex<State>>);

impl Signals {
    /// Blocks the signals in this thread, and thereby in all threads that it starts later, and starts the thread
    /// that waits for them. Must be called before any other thread is started.
    pub(crate) fn take_over() -> Self {
        let set = block(ENDING.into_iter().chain(OTHERS));
        let signals = Self(Arc::new(Mutex::new(State {
            at_end: AtEnd::Nothing,
            target: None,
            first: None,
        })));
        let of_thread = signals.clone();
        thread::spawn(move || {
            let mut connection = None;
            while let Ok(signal) = set.wait() {
                of_thread.handle(signal, &mut connection);
            }
        });
        signals
    }

    /// Sets the cleanup after a signal.
    pub(crate) fn at_end(&self, at_end: AtEnd) {
        self.state().at_end = at_end;
    }

    /// Exit code for a signal that arrived before there was a command to receive it.
    pub(crate) fn received(&self) -> Option<u8> {
        self.state()
            .first
            .map(|(signal, _)| status::code_of(signal))
    }

    /// From now on, signals go to this process. A signal that has already arrived is forwarded at once.
    pub(super) fn forward_to(&self, route: SandboxRoute, pid: u32, order: &Order) {
        let target = Target {
            route,
            pid,
            user: order.user.clone(),
            streams: order.streams,
        };
        let missed = {
            let mut state = self.state();
            state.target = Some(target.clone());
            state.first
        };
        if let Some((signal, _)) = missed {
            let _process_has_ended = target.send(signal, &mut None);
        }
    }

    pub(super) fn forward_to_none(&self) {
        self.state().target = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self, signal: Signal, connection: &mut Option<EnvdClient<Wire>>) {
        let is_ending = ENDING.contains(&signal);
        let (target, first) = {
            let mut state = self.state();
            let first = state.first;
            if is_ending {
                state.first.get_or_insert((signal, Instant::now()));
            }
            (state.target.clone(), first.filter(|_| is_ending))
        };
        match first {
            Some((former, at)) if former == signal && at.elapsed() < SAME => return,
            Some(_) => self.end(signal),
            None => {}
        }
        if is_ending {
            let late = self.clone();
            thread::spawn(move || {
                thread::sleep(GRACE);
                late.end(signal);
            });
        }
        // A process that has ended receives no signal: the main thread is about to exit with its code.
        if let Some(target) = target
            && target.send(signal, connection).is_err()
        {
            *connection = None;
        }
    }

    /// Ends the program immediately, with everything that it has started.
    fn end(&self, signal: Signal) -> ! {
        terminal::restore();
        let (at_end, target) = {
            let mut state = self.state();
            let at_end = std::mem::replace(&mut state.at_end, AtEnd::Nothing);
            (at_end, state.target.take())
        };
        match (at_end, target) {
            (AtEnd::KillSandbox(mut server, id), _) => {
                if let Err(why) = server.delete(&format!("/sandboxes/{}", segment(&id))) {
                    eprintln!("cube: cannot kill sandbox {id}: {why}");
                }
            }
            (AtEnd::KillProcess, Some(target)) => {
                let _process_has_ended = target.kill();
            }
            (AtEnd::KillProcess, None) | (AtEnd::Nothing, _) => {}
        }
        std::process::exit(i32::from(status::code_of(signal)))
    }
}

/// Blocks the signals that end a program, for a thread that waits for them. Must be called before any other thread is
/// started.
pub(crate) fn ending() -> SigSet {
    block(ENDING.into_iter())
}

/// Blocks the signals in this list that are not ignored.
fn block(signals: impl Iterator<Item = Signal>) -> SigSet {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set: SigSet = signals
        .filter(|signal| !is_ignored(&status, *signal))
        .collect();
    // pthread_sigmask(3) fails only for an invalid operation.
    let _never = set.thread_block();
    set
}

/// Whether the program with this /proc/PID/status ignores a signal.
fn is_ignored(status: &str, signal: Signal) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal as u32 - 1) & 1 == 1
}

/// An incomplete file, removed if a signal ends the program.
#[derive(Clone, Default)]
pub(crate) struct Draft(Arc<Mutex<Option<PathBuf>>>);

impl Draft {
    /// Must be called before any other thread is started.
    pub(crate) fn guarded() -> Self {
        let (set, draft) = (ending(), Self::default());
        let of_thread = draft.clone();
        thread::spawn(move || {
            if let Ok(signal) = set.wait() {
                let path = of_thread.path();
                if let Some(path) = path.as_deref() {
                    let _complete_by_now = fs::remove_file(path);
                }
                std::process::exit(i32::from(status::code_of(signal)));
            }
        });
        draft
    }

    pub(crate) fn is(&self, path: Option<&Path>) {
        *self.path() = path.map(Path::to_owned);
    }

    fn path(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target {
    fn send(
        &self,
        signal: Signal,
        connection: &mut Option<EnvdClient<Wire>>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let client = match connection {
            Some(client) => client,
            None => connection.insert(self.route.dial()?),
        };
        client.set_timeout(ANSWER);
        match (signal, self.streams) {
            (Signal::SIGWINCH, Streams::Terminal(_)) => Ok(self.resize(client)?),
            (Signal::SIGWINCH, Streams::Pipes) => Ok(()),
            (Signal::SIGTERM, _) => Ok(self.ask(client, AgentSignal::Term)?),
            (other, _) => Ok(self.run_kill(client, other)?),
        }
    }

    fn resize(&self, client: &mut EnvdClient<Wire>) -> Result<(), ClientError> {
        let request = UpdateRequest {
            process: self.selector(),
            pty: Some(Pty {
                size: Some(terminal::size()),
            }),
        };
        client.call::<_, Empty>("process.Process/Update", &request)?;
        Ok(())
    }

    fn ask(&self, client: &mut EnvdClient<Wire>, signal: AgentSignal) -> Result<(), ClientError> {
        let request = SendSignalRequest {
            process: self.selector(),
            signal,
        };
        client.call::<_, Empty>("process.Process/SendSignal", &request)?;
        Ok(())
    }

    /// E2B's interface only has TERM and KILL. A command's process leads its own group, so kill(1) reaches the
    /// whole group, as the keys of a terminal do.
    fn run_kill(&self, client: &mut EnvdClient<Wire>, signal: Signal) -> Result<(), ClientError> {
        let name = signal.as_str().trim_start_matches("SIG");
        let script = format!("kill -s {name} -- -{}", self.pid);
        let request = ExecRequest {
            user: self.user.clone(),
            ..ExecRequest::new("/bin/sh", &["-c", &script])
        };
        let ended = client.exec(&request, ANSWER)?;
        if ended.exit_code == 0 {
            return Ok(());
        }
        self.ask(client, AgentSignal::Term)
    }

    fn kill(&self) -> Result<(), Box<dyn std::error::Error>> {
        let mut client = self.route.dial()?;
        client.set_timeout(ANSWER);
        Ok(self.ask(&mut client, AgentSignal::Kill)?)
    }

    fn selector(&self) -> ProcessSelector {
        ProcessSelector {
            pid: Some(self.pid),
            tag: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_those_of_the_mask() {
        let status = "SigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, Signal::SIGHUP) && is_ignored(status, Signal::SIGPIPE));
        assert!(!is_ignored(status, Signal::SIGINT) && !is_ignored("", Signal::SIGHUP));
    }
}
