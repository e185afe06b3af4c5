//! The host of Jupyter kernels: a process of its own between the server and one kernel, whatever language
//! that speaks.
//!
//! ```text
//! server ── control socket (message) ── bridge ── shell, control (DEALER), iopub (SUB) ── kernel
//!    └──────────── stdout, stderr: what the kernel's children print ─────────────────────────┘
//! ```
//! A kernel is started on first use, never before a snapshot, with a key of its own. In a fork of a sandbox
//! its kernels go on with key and ports that both know: they are of use inside of either sandbox only.
//!
//! What must never happen: a bridge that outlives its kernel, or a kernel that outlives its bridge.

mod control;
mod display;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod process;
mod spec;
mod wire;
mod words;
mod zmtp;

use std::{
    collections::BTreeMap,
    io,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use control::Control;
use display::Weight;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigSet, Signal, killpg},
    sys::signalfd::{SfdFlags, SignalFd},
    unistd::getpgrp,
};
use process::{Connected, Process, StartError};
use serde_json::{Value, json};
use spec::{InterruptMode, Spec, SpecError};
use wire::{Message, Session};
use words::{Changes, Tongue};
use zmtp::Socket;

pub(crate) use spec::{Kernel, find};

use crate::{
    clone_state::Variables,
    event::{Event, now},
    message::{Request, is_name},
};

/// Everything is read through a buffer of this size.
const SCRATCH: usize = 64 << 10;
/// An interrupt that comes just before a cell's code runs, or while the kernel tells of its end, may take half of that
/// end away (ipykernel: the reply). After one, this long without the other half ends the cell as well.
const HALF_END: Duration = Duration::from_secs(2);

/// The bridge cannot go on. A kernel that ends is the usual case.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("cannot start the kernel")]
    Start(#[from] StartError),
    #[error("the kernel has ended, or speaks another protocol")]
    Kernel(#[source] io::Error),
    #[error("the server is gone")]
    Server(#[source] io::Error),
}

/// Serves cells until server or kernel is gone. The kernelspec is in `dir`.
pub(crate) fn run(dir: &Path) -> Result<(), KernelError> {
    let spec = Spec::load(dir)?;
    let interrupts = take_interrupts().map_err(KernelError::Server)?;
    let mut control = Control::take_standard_input().map_err(KernelError::Server)?;
    let mut session = Session::new().map_err(StartError::from)?;
    let Connected {
        process,
        shell,
        orders,
        news,
    } = process::start(&spec, dir, &mut session)?;
    control
        .say("{\"ready\":true}")
        .map_err(KernelError::Server)?;
    let mut bridge = Bridge {
        control,
        interrupts,
        mode: spec.interrupt_mode,
        tongue: Tongue::of(&spec.language),
        variables: process.variables.clone(),
        _process: process,
        session,
        shell,
        orders,
        news,
        scratch: vec![0; SCRATCH],
        asked: 0,
        seeded: false,
    };
    loop {
        let request = bridge.control.next_request();
        let Some(request) = request.map_err(KernelError::Server)? else {
            return Ok(());
        };
        bridge.cell(&request)?;
    }
}

/// Interrupts are read from a descriptor: they are for the kernel.
fn take_interrupts() -> io::Result<SignalFd> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    Ok(SignalFd::with_flags(
        &signals,
        SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK,
    )?)
}

struct Bridge {
    control: Control,
    interrupts: SignalFd,
    mode: InterruptMode,
    tongue: Tongue,
    /// What the kernel's environment is, as far as the server or its own start made it.
    variables: Variables,
    _process: Process,
    session: Session,
    shell: Socket,
    /// The kernel's control socket.
    orders: Socket,
    /// The kernel's iopub socket.
    news: Socket,
    scratch: Vec<u8>,
    /// Interrupts of the present cell that the server asked for and the kernel has not been told of.
    asked: u32,
    /// Whether the kernel has its first cell behind it: it seeded itself when it started.
    seeded: bool,
}

/// What becomes of what a request makes the kernel say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Audience {
    Client,
    Nobody,
}

/// How far a request is.
#[derive(Default)]
struct Progress {
    /// Whether the kernel has said more of it than that it is busy.
    begun: bool,
    replied: bool,
    idle: bool,
    failed: bool,
    interrupted: bool,
    /// When the first of `replied` and `idle` came.
    half: Option<Instant>,
}

impl Progress {
    fn is_over(&self) -> bool {
        self.replied && self.idle || self.left() == Some(Duration::ZERO)
    }

    /// How long an interrupted request's other half is waited for; `None`: for as long as it takes.
    fn left(&self) -> Option<Duration> {
        let half = self.half.filter(|_| self.interrupted)?;
        Some(HALF_END.saturating_sub(half.elapsed()))
    }
}

impl Bridge {
    fn cell(&mut self, request: &Request) -> Result<(), KernelError> {
        self.asked = 0;
        if request.seed && std::mem::replace(&mut self.seeded, true) {
            self.whisper(self.tongue.seed().map(str::to_owned))?;
        }
        if let Some(base) = &request.base {
            let changes = changes(&self.variables, base);
            let told = self.change(&changes)?;
            if told {
                apply(&mut self.variables, &changes);
            }
        }
        let (set, undo) = for_one_cell(&self.variables, &request.env);
        if self.change(&set)? {
            self.execute(&request.code, Audience::Client, !request.unstored)?;
            self.change(&undo)?;
        } else {
            self.refuse_variables()?;
        }
        self.say("{\"done\":true}")
    }

    /// Changes variables of the kernel; false when its language has no known words for that.
    fn change(&mut self, changes: &Changes) -> Result<bool, KernelError> {
        if changes.is_empty() {
            return Ok(true);
        }
        match self.tongue.change(changes) {
            Some(code) => self.whisper(Some(code)).map(|()| true),
            None => Ok(false),
        }
    }

    fn refuse_variables(&mut self) -> Result<(), KernelError> {
        let value = "nobody knows how to set variables in a running kernel of this language: \
             give them when the sandbox is created";
        self.tell(&Event::Error {
            name: "EnvironmentError",
            value,
            traceback: value,
        })
    }

    /// Runs code that nobody hears of.
    fn whisper(&mut self, code: Option<String>) -> Result<(), KernelError> {
        match code {
            Some(code) => self.execute(&code, Audience::Nobody, false),
            None => Ok(()),
        }
    }

    /// Runs code until the kernel has answered and has said all that belongs to it.
    fn execute(&mut self, code: &str, audience: Audience, stored: bool) -> Result<(), KernelError> {
        let heard = audience == Audience::Client;
        let content = json!({
            "code": code, "silent": !heard, "store_history": stored, "user_expressions": {},
            "allow_stdin": false, "stop_on_error": false,
        });
        let (id, parts) = self.session.request("execute_request", &content);
        self.shell.send(&parts).map_err(KernelError::Kernel)?;
        let mut progress = Progress::default();
        while !progress.is_over() {
            let ready = self.wait(progress.left())?;
            let [shell, orders, news, interrupts] = ready;
            if interrupts && self.take_interrupt() {
                self.asked += 1;
            }
            if news {
                for message in receive(&mut self.news, &self.session, &mut self.scratch)? {
                    if message.parent == id {
                        self.hear(&message, audience, &mut progress)?;
                    }
                }
            }
            if shell {
                for message in receive(&mut self.shell, &self.session, &mut self.scratch)? {
                    if message.parent == id && message.kind == "execute_reply" {
                        progress.replied = true;
                        self.reply(&message.content, audience, &mut progress)?;
                    }
                }
            }
            if orders {
                // Answers to interrupts say nothing.
                receive(&mut self.orders, &self.session, &mut self.scratch)?;
            }
            if progress.half.is_none() && (progress.replied || progress.idle) {
                progress.half = Some(Instant::now());
            }
            if heard && self.is_time_to_interrupt(&progress) {
                self.asked = 0;
                progress.interrupted = true;
                self.interrupt()?;
            }
        }
        if !progress.replied && heard && !progress.failed {
            self.error(&json!({"ename": "KeyboardInterrupt", "evalue": ""}))?;
        }
        Ok(())
    }

    /// Waits for the kernel or an interrupt, at most `limit`; which of them has something to say.
    fn wait(&self, limit: Option<Duration>) -> Result<[bool; 4], KernelError> {
        let mut fds = [
            self.shell.as_fd(),
            self.orders.as_fd(),
            self.news.as_fd(),
            self.interrupts.as_fd(),
        ]
        .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // Rounded up, so that what is left is gone when nothing comes.
        let limit = limit.map_or(PollTimeout::NONE, |limit| {
            PollTimeout::try_from(limit + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, limit) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(KernelError::Kernel(errno.into())),
        }
        Ok(fds.map(|fd| fd.any() == Some(true)))
    }

    /// Whether the server has asked for an interrupt. Those that this process sends to its group do not count.
    fn take_interrupt(&mut self) -> bool {
        let mut asked = false;
        while let Ok(Some(signal)) = self.interrupts.read_signal() {
            asked |= signal.ssi_pid != std::process::id();
        }
        asked
    }

    /// A kernel may be deaf until it has begun with a cell (ipykernel ignores signals until then), and when it tells of
    /// the end there is nothing left to interrupt. Who asks twice is not made to wait for a beginning.
    fn is_time_to_interrupt(&self, progress: &Progress) -> bool {
        let hears = progress.begun && self.asked > 0 || self.asked > 1;
        hears && progress.half.is_none()
    }

    fn interrupt(&mut self) -> Result<(), KernelError> {
        match self.mode {
            InterruptMode::Message => {
                let (_, parts) = self.session.request("interrupt_request", &json!({}));
                self.orders.send(&parts).map_err(KernelError::Kernel)?;
            }
            // The kernel with all that it started; fails only when all of them are gone.
            InterruptMode::Signal => drop(killpg(getpgrp(), Signal::SIGINT)),
        }
        Ok(())
    }

    fn hear(
        &mut self,
        message: &Message,
        audience: Audience,
        progress: &mut Progress,
    ) -> Result<(), KernelError> {
        let content = &message.content;
        if message.kind == "status" {
            progress.idle |= content["execution_state"] == "idle";
            return Ok(());
        }
        progress.begun = true;
        if audience == Audience::Nobody {
            return Ok(());
        }
        match message.kind.as_str() {
            "stream" => {
                let (text, timestamp) = (content["text"].as_str().unwrap_or_default(), now());
                self.tell(&match content["name"].as_str() {
                    Some("stderr") => Event::Stderr { text, timestamp },
                    _ => Event::Stdout { text, timestamp },
                })
            }
            "execute_result" => self.say(&display::result(content, Weight::Main)),
            "display_data" => self.say(&display::result(content, Weight::Aside)),
            "error" => {
                progress.failed = true;
                self.error(content)
            }
            // Others are for clients with a screen, on which things can be changed.
            _ => Ok(()),
        }
    }

    /// A cell that was given up has an answer and no error of its own.
    fn reply(
        &mut self,
        content: &Value,
        audience: Audience,
        progress: &mut Progress,
    ) -> Result<(), KernelError> {
        let status = content["status"].as_str().unwrap_or_default();
        if status == "aborted" && audience == Audience::Client && !progress.failed {
            self.error(&json!({"ename": "Aborted", "evalue": "the cell was not run"}))?;
        }
        Ok(())
    }

    fn error(&mut self, content: &Value) -> Result<(), KernelError> {
        let text = |name: &str| content[name].as_str().unwrap_or_default();
        let lines = content["traceback"].as_array();
        let lines = lines.map(|lines| lines.iter().filter_map(Value::as_str));
        let traceback: Vec<&str> = lines.map(Iterator::collect).unwrap_or_default();
        self.tell(&Event::Error {
            name: text("ename"),
            value: text("evalue"),
            traceback: &traceback.join("\n"),
        })
    }

    fn tell(&mut self, event: &Event<'_>) -> Result<(), KernelError> {
        let line = event.line();
        self.control.send(&line).map_err(KernelError::Server)
    }

    fn say(&mut self, line: &str) -> Result<(), KernelError> {
        self.control.say(line).map_err(KernelError::Server)
    }
}

fn receive(
    socket: &mut Socket,
    session: &Session,
    scratch: &mut [u8],
) -> Result<Vec<Message>, KernelError> {
    socket.receive(scratch).map_err(KernelError::Kernel)?;
    let mut messages = Vec::new();
    while let Some(parts) = socket.next_message().map_err(KernelError::Kernel)? {
        messages.extend(session.read(&parts));
    }
    Ok(messages)
}

/// What has to change for `base` to hold. Variables that were there before and are not in it stay: they are
/// the kernel's own.
fn changes(now: &Variables, base: &Variables) -> Changes {
    let named = base.iter().filter(|(name, _)| is_name(name));
    named
        .filter(|(name, value)| now.get(*name) != Some(*value))
        .map(|(name, value)| (name.clone(), Some(value.clone())))
        .collect()
}

fn apply(variables: &mut Variables, changes: &Changes) {
    for (name, value) in changes {
        match value {
            Some(value) => drop(variables.insert(name.clone(), value.clone())),
            None => drop(variables.remove(name)),
        }
    }
}

/// What one cell's variables change, and what undoes that.
fn for_one_cell(variables: &Variables, env: &Variables) -> (Changes, Changes) {
    let set: Changes = changes(&BTreeMap::new(), env);
    let before = |name: &String| (name.clone(), variables.get(name).cloned());
    let undo = set.keys().map(before).collect();
    (set, undo)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        let own = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(own).collect()
    }

    #[test]
    fn what_a_cell_sets_is_undone() {
        let mut now = variables(&[("A", "1"), ("PATH", "/bin")]);
        let (set, undo) =
            for_one_cell(&now, &variables(&[("A", "2"), ("B", "3"), ("no name", "")]));
        apply(&mut now, &set);
        assert_eq!(now, variables(&[("A", "2"), ("B", "3"), ("PATH", "/bin")]));
        apply(&mut now, &undo);
        assert_eq!(now, variables(&[("A", "1"), ("PATH", "/bin")]));
        assert!(changes(&now, &variables(&[("A", "1")])).is_empty());
    }
}
