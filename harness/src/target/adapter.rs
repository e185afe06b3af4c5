//! The target `adapter`: a program that starts sandboxes of any platform, one JSON line per request
//! (docs/measure/adapters.md).
//!
//! ```text
//! Adapter, Remote ── Call ──► driver thread ── line ──► adapter's stdin
//!                    ▲              ▲
//!                    └── Reply ─────┴── Line, Closed ── reader thread ◄── adapter's stdout
//! ```
//! The driver owns the process, its stdin, and the pending calls. The reader stamps each line when it arrives;
//! adapters do not report times. Lines, waits and the kept part of stderr are bounded, so an adapter can only make
//! its own starts fail.

mod driver;
mod line;

use std::{
    io,
    path::Path,
    sync::mpsc::{self, Sender},
    time::Duration,
};

use model::{StartPhase, Timeline};

use super::{About, CloneId, Output, PageCache, Sandbox, Target};
use crate::{
    event::{Failure, FailureCause},
    scenario::ExecSpec,
};
use driver::{Driver, Message, Reply};
use line::{Answer, Op, Request};

/// Version of the protocol, in both directions of `hello`.
const PROTOCOL: u32 = 1;
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// A running adapter. Dropping it closes its standard input, waits for it to end, and then kills its process group.
#[derive(Debug)]
pub struct Adapter {
    calls: Calls,
    about: About,
    template: String,
    driver: Option<std::thread::JoinHandle<()>>,
}

impl Adapter {
    /// Starts the program and exchanges `hello`. The first MiB of its standard error is written to `stderr`.
    ///
    /// # Errors
    /// Returns [`FailureCause::Spawn`] if the program cannot be started, and the error of `hello` if the
    /// adapter does not respond or speaks another version of the protocol.
    pub fn start(
        command: &[String],
        template: &str,
        timeout: Duration,
        stderr: &Path,
    ) -> Result<Self, Failure> {
        let (messages, received) = mpsc::channel();
        let driver = Driver::spawn(command, stderr, messages.clone(), received)?;
        let mut adapter = Self {
            calls: Calls { messages, timeout },
            about: About::default(),
            template: template.to_owned(),
            driver: Some(driver),
        };
        adapter.about = adapter.hello()?;
        Ok(adapter)
    }

    fn hello(&self) -> Result<About, Failure> {
        let request = Request {
            protocol: Some(PROTOCOL),
            ..Request::new(Op::Hello)
        };
        let (answer, _) = self.calls.call(request, HELLO_TIMEOUT)?;
        match answer.protocol {
            Some(PROTOCOL) => Ok(About {
                version: answer.version.map(|text| line::printable(&text)),
                platform: answer.platform.map(|text| line::printable(&text)),
            }),
            other => Err(Failure {
                cause: FailureCause::Connect,
                message: format!(
                    "the adapter speaks protocol {other:?}, this cube-bench speaks {PROTOCOL}"
                ),
            }),
        }
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        let _ = self.calls.messages.send(Message::Finish);
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
    }
}

impl Target for Adapter {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let request = Request {
            name: Some(id.to_string()),
            template: Some(self.template.clone()),
            ..Request::new(Op::Start)
        };
        let (answer, at_ns) = self.calls.call(request, self.calls.timeout)?;
        let sandbox = answer.sandbox()?;
        timeline.stamp(StartPhase::Replied, at_ns);
        Ok(Box::new(Remote {
            calls: self.calls.clone(),
            sandbox,
            alive: true,
        }))
    }

    fn prepare_cache(&self, _: PageCache) -> io::Result<()> {
        // The adapter decides how its platform keeps templates.
        Ok(())
    }

    fn about(&self) -> About {
        self.about.clone()
    }
}

/// Handle to the driver.
#[derive(Clone, Debug)]
struct Calls {
    messages: Sender<Message>,
    /// Timeout of a start and of a stop.
    timeout: Duration,
}

impl Calls {
    /// Sends a request and waits for its response, with the time at which it arrived.
    fn call(&self, request: Request, timeout: Duration) -> Reply {
        let (reply, answered) = mpsc::sync_channel(1);
        let ended = || Failure {
            cause: FailureCause::Connect,
            message: "the adapter was already ended".to_owned(),
        };
        let call = Message::Call {
            request: Request {
                timeout_ms: Some(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
                ..request
            },
            timeout,
            reply,
        };
        self.messages.send(call).map_err(|_| ended())?;
        answered.recv().map_err(|_| ended())?
    }
}

/// A sandbox of the adapter. Dropping it stops it.
struct Remote {
    calls: Calls,
    sandbox: String,
    alive: bool,
}

impl Remote {
    fn stop(&mut self) -> Result<(), Failure> {
        self.alive = false;
        let request = Request {
            sandbox: Some(self.sandbox.clone()),
            ..Request::new(Op::Stop)
        };
        self.calls.call(request, self.calls.timeout).map(|_| ())
    }

    fn refuse(what: &str) -> Failure {
        Failure {
            cause: FailureCause::Exec,
            message: format!("adapters cannot {what}: the protocol has only start, exec and stop"),
        }
    }
}

impl Sandbox for Remote {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        if command.cell.is_some() {
            return Err(Self::refuse("run cells"));
        }
        let request = Request {
            sandbox: Some(self.sandbox.clone()),
            argv: Some(command.argv.clone()),
            user: Some(command.user.clone()),
            ..Request::new(Op::Exec)
        };
        let (answer, _) = self.calls.call(request, command.timeout)?;
        Ok(answer.output())
    }

    fn write_file(&mut self, _: &str, _: &[u8]) -> Result<(), Failure> {
        Err(Self::refuse("write files"))
    }

    fn set_network(&mut self, _: &serde_json::Value) -> Result<(), Failure> {
        Err(Self::refuse("set network policies"))
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn kill(mut self: Box<Self>) -> Result<(), Failure> {
        self.stop()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if self.alive {
            // On failure, the adapter removes the sandbox when its standard input ends.
            let _ = self.stop();
        }
    }
}

impl Answer {
    /// The id of a started sandbox.
    fn sandbox(&self) -> Result<String, Failure> {
        let id = self.sandbox.as_deref().unwrap_or_default();
        if id.is_empty() || id.len() > line::MAX_ID || id.chars().any(char::is_control) {
            return Err(Failure {
                cause: FailureCause::Create,
                message: format!(
                    "the adapter answered a start without a valid `sandbox`: 1 to {} characters",
                    line::MAX_ID
                ),
            });
        }
        Ok(id.to_owned())
    }

    fn output(self) -> Output {
        Output {
            status: self.status,
            stdout: self.stdout.into_bytes(),
            stderr: self.stderr.into_bytes(),
        }
    }
}

#[cfg(test)]
mod tests;
