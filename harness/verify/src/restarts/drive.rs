//! Restarts the server repeatedly, and records when it and the sandboxes respond.

use std::{
    io::{self, Read},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use envd::EnvdClient;
use model::{chain, clock::monotonic_ns};
use stats::random::SplitMix64;
use testbed::server::LocalServer;

use super::{
    RestartSpec,
    figures::{Bare, Ended, Kind},
    judge::Restart,
    line::{Pace, Trouble, connect},
    load::Site,
    program::Program,
    reach::{Reached, reach},
};

/// Maximum wait for a server to respond or to reload, after which the run ends.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of one probe of a server that accepts connections.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(1);
/// After a restart: time for clients to notice cut streams and to open new ones.
const SETTLE: Duration = Duration::from_millis(500);
/// Longest time of undisturbed load before a restart.
const LOAD_MS: usize = 1500;
/// One in this many unplanned restarts is killed again during its start.
const KILLED_AGAIN: usize = 3;
/// Attempts of a failing start before the run ends.
const ATTEMPTS: u32 = 3;

/// Restarts one server.
pub(super) struct Drive<'a> {
    spec: &'a RestartSpec,
    server: LocalServer,
    program: Program,
    metrics_key: Option<String>,
    random: SplitMix64,
    interrupted: &'a AtomicBool,
    /// Duration of the last start, for kills during a start.
    typical: Duration,
    pub(super) restarts: Vec<Restart>,
    pub(super) bare: Option<Bare>,
    is_hung: bool,
}

impl<'a> Drive<'a> {
    pub(super) fn new(
        spec: &'a RestartSpec,
        server: LocalServer,
        program: Program,
        interrupted: &'a AtomicBool,
    ) -> Self {
        let metrics_key = new_metrics_key(&server);
        Self {
            spec,
            server,
            program,
            metrics_key,
            random: SplitMix64::new(spec.seed),
            interrupted,
            typical: Duration::from_secs(1),
            restarts: Vec::new(),
            bare: None,
            is_hung: false,
        }
    }

    /// Performs all restarts with load. Ends early if the run is interrupted or the server does not respond.
    pub(super) fn run_loaded(&mut self, site: &Site<'_>) {
        let kinds = [
            (Kind::Unplanned, self.spec.unplanned),
            (Kind::Planned, self.spec.planned),
        ];
        for (kind, count) in kinds {
            for n in 1..=count {
                self.wait_a_while();
                if self.is_over() {
                    return;
                }
                let restart = match kind {
                    Kind::Unplanned => self.kill_and_start(site),
                    Kind::Planned => self.reload(site),
                };
                announce(n, count, &restart);
                self.restarts.push(restart);
            }
        }
        self.wait_a_while();
    }

    /// Restarts without load, each at a random moment of the start. The last server runs.
    pub(super) fn run_bare(&mut self, site: &Site<'_>) {
        if self.spec.bare == 0 || self.is_over() {
            return;
        }
        let mut bare = Bare::default();
        for _ in 0..self.spec.bare {
            if self.interrupted.load(Ordering::Relaxed) {
                break;
            }
            if let Err(error) = self.kill_and_begin() {
                bare.failed.push(error);
                continue;
            }
            bare.starts += 1;
            let lives = self.moment(self.typical.mul_f64(1.5));
            let deadline = Instant::now() + lives;
            let mut is_up = false;
            while Instant::now() < deadline {
                if let Some(error) = self.server.exited() {
                    bare.failed.push(chain(&error));
                    break;
                }
                is_up = is_up || self.probe(site, lives.max(POLL)).is_ok();
                thread::sleep(POLL);
            }
            bare.killed_early += u32::from(!is_up);
            if bare.starts.is_multiple_of(50) {
                eprintln!(
                    "cube-bench: {} starts without load, {} failed",
                    bare.starts,
                    bare.failed.len()
                );
            }
        }
        if self.is_over() {
            self.bare = Some(bare);
            return;
        }
        // The last start completes, and the server must find every sandbox. It has no load, so it does not count as
        // one of the restarts.
        let last = self.kill_and_start(site);
        announce(1, 1, &last);
        bare.failed.extend(last.faults);
        for reached in last.reached {
            if let Reached::Lost(why) = reached {
                bare.failed.push(why);
            }
        }
        self.bare = Some(bare);
    }

    /// The server, which the caller must end, and why the run ended.
    pub(super) fn finish(self) -> (LocalServer, Program, Vec<Restart>, Option<Bare>, Ended) {
        let ended = if self.interrupted.load(Ordering::Relaxed) {
            Ended::Interrupted
        } else if self.is_hung {
            Ended::Hung
        } else {
            Ended::Complete
        };
        (self.server, self.program, self.restarts, self.bare, ended)
    }

    fn is_over(&self) -> bool {
        self.is_hung || self.interrupted.load(Ordering::Relaxed)
    }

    /// Lets the load run for a random time.
    fn wait_a_while(&mut self) {
        let most = Duration::from_millis(LOAD_MS as u64);
        let deadline = Instant::now() + self.moment(most);
        while Instant::now() < deadline && !self.is_over() {
            thread::sleep(POLL * 10);
        }
    }

    /// A random duration up to `most`.
    fn moment(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.unit())
    }

    fn kill_and_begin(&mut self) -> Result<(), String> {
        self.server.kill().map_err(|error| error.to_string())?;
        self.program
            .take_turns()
            .map_err(|error| error.to_string())?;
        self.server.begin().map_err(|error| chain(&error))
    }

    fn kill_and_start(&mut self, site: &Site<'_>) -> Restart {
        let warm_before = self.warm(site);
        let mut restart = self.new_restart(Kind::Unplanned);
        loop {
            if let Err(error) = self.kill_and_begin() {
                restart.faults.push(error);
                self.is_hung = true;
                break;
            }
            restart.exec_ns = monotonic_ns();
            restart.starts += 1;
            if restart.starts < ATTEMPTS && self.random.below(KILLED_AGAIN) == 0 {
                let most = self.typical.mul_f64(1.2);
                thread::sleep(self.moment(most));
                if let Some(error) = self.server.exited() {
                    restart.faults.push(chain(&error));
                }
                continue;
            }
            match self.await_answer(site, &mut restart) {
                Ok(()) => break,
                Err(error) => restart.faults.push(error),
            }
            if self.is_hung || restart.faults.len() >= ATTEMPTS as usize {
                self.is_hung = true;
                break;
            }
        }
        if !self.is_hung {
            self.typical = Duration::from_nanos(monotonic_ns() - restart.exec_ns);
        }
        self.complete(restart, site, warm_before)
    }

    fn reload(&mut self, site: &Site<'_>) -> Restart {
        let warm_before = self.warm(site);
        let mut restart = self.new_restart(Kind::Planned);
        restart.starts = 1;
        let done = self.program.take_turns().and_then(|()| {
            restart.build = self.program.build();
            restart.begun_ns = monotonic_ns();
            restart.exec_ns = restart.begun_ns;
            self.command_reload()
        });
        match done {
            Ok(()) => restart.answered_ns = Some(monotonic_ns()),
            Err(error) => restart.faults.push(error.to_string()),
        }
        if self.server.processes().is_empty() {
            restart
                .faults
                .push("the server ended instead of reloading".to_owned());
            let again = self.kill_and_begin();
            let again = again.and_then(|()| self.await_answer(site, &mut restart));
            self.is_hung = again.is_err();
            restart.faults.extend(again.err());
        }
        self.complete(restart, site, warm_before)
    }

    /// Runs `cube-api reload` and waits for it to end.
    fn command_reload(&self) -> io::Result<()> {
        let mut child = Command::new(self.program.path())
            .args(["reload", "--state"])
            .arg(self.server.state())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let deadline = Instant::now() + START_TIMEOUT;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > deadline => {
                    child.kill()?;
                    child.wait()?;
                    let what = format!("cube-api reload did not end within {START_TIMEOUT:?}");
                    return Err(io::Error::other(what));
                }
                None => thread::sleep(POLL),
            }
        };
        if status.success() {
            return Ok(());
        }
        let mut text = String::new();
        if let Some(stderr) = &mut child.stderr {
            // Processes that the command started could keep the pipe open.
            stderr.take(4096).read_to_string(&mut text)?;
        }
        Err(io::Error::other(format!(
            "cube-api reload ended with {status}: {}",
            text.trim()
        )))
    }

    fn new_restart(&self, kind: Kind) -> Restart {
        Restart {
            kind,
            build: self.program.build(),
            begun_ns: monotonic_ns(),
            exec_ns: 0,
            connected_ns: None,
            answered_ns: None,
            settled_ns: 0,
            starts: 0,
            reached: Vec::new(),
            servers: 0,
            warm: [None; 2],
            faults: Vec::new(),
        }
    }

    /// Contacts every sandbox, and waits until clients have reconnected.
    fn complete(&mut self, mut restart: Restart, site: &Site<'_>, warm: Option<u64>) -> Restart {
        restart.build = self.program.build();
        if !self.is_over() {
            restart.reached = reach(site.api, site.guests);
            restart.warm = [warm, self.warm(site)];
            thread::sleep(SETTLE);
        }
        restart.servers = self.server.processes().len();
        restart.settled_ns = monotonic_ns();
        restart
    }

    /// Waits for the first connection and the first response.
    fn await_answer(&mut self, site: &Site<'_>, restart: &mut Restart) -> Result<(), String> {
        let deadline = Instant::now() + START_TIMEOUT;
        restart.connected_ns = None;
        let mut last = "no connection".to_owned();
        // An interrupt from the terminal ends the server as well.
        while Instant::now() < deadline && !self.is_over() {
            if restart.connected_ns.is_none() && site.api.control.dial(PROBE_TIMEOUT).is_ok() {
                restart.connected_ns = Some(monotonic_ns());
            }
            if restart.connected_ns.is_some() {
                match self.probe(site, PROBE_TIMEOUT) {
                    Ok(()) => {
                        restart.answered_ns = Some(monotonic_ns());
                        return Ok(());
                    }
                    Err(why) => last = why,
                }
            }
            if let Some(error) = self.server.exited() {
                return Err(chain(&error));
            }
            thread::sleep(POLL);
        }
        self.is_hung = true;
        let silent = chain(&self.server.silent());
        Err(format!("{silent}; the last probe: {last}"))
    }

    /// Looks up a sandbox. A working server returns 200.
    fn probe(&self, site: &Site<'_>, timeout: Duration) -> Result<(), String> {
        let guest = site.guests.pick(0).ok_or("there is no sandbox")?;
        let mut api = site.api.clone();
        api.timeout = timeout;
        let look_up = || {
            let mut client = connect(&api, &api.control, Pace::Full)?;
            let path = format!("/sandboxes/{}", guest.id());
            Ok::<_, Trouble>(api.request(&mut client, "GET", &path, b"")?)
        };
        match look_up() {
            Ok(answer) if answer.status == 200 => Ok(()),
            Ok(answer) => {
                let body = String::from_utf8_lossy(&answer.body);
                Err(Trouble::status(answer.status, &body).text)
            }
            Err(trouble) => Err(trouble.text),
        }
    }

    /// Warm slots, from the server's metrics.
    fn warm(&self, site: &Site<'_>) -> Option<u64> {
        let wire = site.api.control.dial(PROBE_TIMEOUT).ok()?;
        let mut client = EnvdClient::over(wire, PROBE_TIMEOUT);
        let key = self.metrics_key.as_deref()?;
        client.set_route(&site.api.control.authority(), &[("x-api-key", key)]);
        let answer = client.request("GET", "/metrics", &[], b"").ok()?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        let mut lines = text.lines();
        lines
            .find_map(|line| line.strip_prefix("cube_pool_warm "))?
            .trim()
            .parse()
            .ok()
    }
}

fn announce(n: u32, count: u32, restart: &Restart) {
    let answered = restart.answered_ns.map_or("no answer".to_owned(), |at| {
        format!("{} ms", at.saturating_sub(restart.exec_ns) / 1_000_000)
    });
    let faults = restart.faults.join("; ");
    let kind = restart.kind.name();
    eprintln!("cube-bench: {kind} restart {n} of {count}: {answered} {faults}");
}

/// A key that may read metrics. `None`: warm slots are not reported.
fn new_metrics_key(server: &LocalServer) -> Option<String> {
    let made = Command::new(server.program())
        .args([
            "key",
            "new",
            "metrics",
            "--scope",
            "metrics:read",
            "--state",
        ])
        .arg(server.state())
        .output()
        .ok()?;
    let key = String::from_utf8(made.stdout).ok()?;
    Some(key.trim().to_owned()).filter(|key| !key.is_empty())
}
