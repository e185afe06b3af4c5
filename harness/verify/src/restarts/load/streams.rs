//! Streams: no part may be missing or repeated, and a stream that ends early must end with an error.

use std::{thread, time::Duration};

use envd::{
    Blob, ClientError, Empty, EnvdClient, EventType, ExecRequest, ExecStream, ProcessConfig,
    ProcessInput, ProcessSelector, Pty, PtySize, SendInputRequest, SendSignalRequest, Signal,
    StartRequest, WatchDirRequest, WatchStream,
};
use model::clock::monotonic_ns;
use stats::random::SplitMix64;

use super::{BACKOFF, Fault, Site};
use crate::restarts::{
    event::{Cause, Seen, Work},
    guests::Guest,
    line::{IDLE, Line, Pace, Trouble},
};

/// Effectively no timeout for a whole stream. Only the silence of its connection is limited.
const ENDLESS: Duration = Duration::from_secs(86_400);
/// Number of lines of a counter that ends.
const NUMBERS: u64 = 200;
/// Pause between two pieces of input or two changes of a directory.
const STEP: Duration = Duration::from_millis(50);
const WATCHED: &str = "/tmp/prover-watched";

/// Follows a command that prints numbers for the whole run.
pub(super) fn endless_counter(site: &Site<'_>, random: SplitMix64) {
    counter(site, random, u64::MAX >> 2);
}

/// Follows commands that print numbers up to their end, one after another.
pub(super) fn ending_counter(site: &Site<'_>, random: SplitMix64) {
    counter(site, random, NUMBERS);
}

fn counter(site: &Site<'_>, mut random: SplitMix64, last: u64) {
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let began = monotonic_ns();
        let mut pid = None;
        match count(site, guest, last, &mut pid) {
            Ok(()) => {}
            Err(fault) => match pid {
                Some(pid) => {
                    site.record(Work::Counter, monotonic_ns(), fault.cut());
                    end_process(site, guest, pid);
                }
                None => site.record(Work::Counter, began, fault.seen()),
            },
        }
    }
}

/// Follows one command. `pid` is set once the stream is established.
fn count(site: &Site<'_>, guest: &Guest, last: u64, pid: &mut Option<u32>) -> Result<(), Fault> {
    let script = format!("i=0; while [ $i -lt {last} ]; do i=$((i+1)); echo $i; sleep 0.05; done");
    let mut agent = guest.agent(site.api, Pace::Full)?;
    let mut stream = agent.start(&ExecRequest::new("/bin/sh", &["-c", &script]), ENDLESS)?;
    *pid = Some(stream.pid());
    let (mut held, mut next, mut is_over) = (Vec::new(), 1, false);
    let mut began = monotonic_ns();
    while site.goes_on() {
        let Some(event) = stream.next_event()? else {
            break;
        };
        held.extend(
            event
                .data
                .and_then(|data| data.stdout)
                .unwrap_or_default()
                .0,
        );
        is_over |= event.end.is_some_and(|end| end.exit_code == 0);
        while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = held.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            if line.trim_end() != next.to_string() {
                let line = line.trim_end();
                return Err(Fault::Wrong(format!(
                    "the counter printed {line:?} instead of {next}"
                )));
            }
            next += 1;
        }
        site.record(Work::Counter, began, Seen::Done);
        began = monotonic_ns();
    }
    if site.goes_on() && !(is_over && next == last.saturating_add(1)) {
        return Err(Fault::Wrong(format!(
            "the stream of a counter ended as if complete before number {next} of {last}"
        )));
    }
    Ok(())
}

/// Ends a process that no client follows any more. Left running, counters would add load with every restart, so
/// this is repeated while no server responds.
fn end_process(site: &Site<'_>, guest: &Guest, pid: u32) {
    let signal = SendSignalRequest {
        process: selector(pid),
        signal: Signal::Kill,
    };
    while site.goes_on() {
        let sent = guest
            .agent(site.api, Pace::Full)
            .map(|mut agent| agent.call::<_, Empty>("process.Process/SendSignal", &signal));
        match sent {
            Ok(Ok(_)) => return,
            // The agent has no such process.
            Ok(Err(ClientError::Refused { status, .. })) if status < 500 => return,
            Ok(Err(_)) | Err(_) => thread::sleep(BACKOFF),
        }
    }
}

fn selector(pid: u32) -> ProcessSelector {
    ProcessSelector {
        pid: Some(pid),
        tag: None,
    }
}

/// Types into a terminal in which `cat` runs, and waits until both the terminal and `cat` have echoed.
pub(super) fn terminal(site: &Site<'_>, mut random: SplitMix64) {
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let began = monotonic_ns();
        let mut pid = None;
        match talk(site, guest, &mut pid) {
            Ok(()) => {}
            Err(fault) => match pid {
                Some(pid) => {
                    site.record(Work::Pty, monotonic_ns(), fault.cut());
                    end_process(site, guest, pid);
                }
                None => site.record(Work::Pty, began, fault.seen()),
            },
        }
    }
}

fn talk(site: &Site<'_>, guest: &Guest, pid: &mut Option<u32>) -> Result<(), Fault> {
    let start = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/cat".to_owned(),
            ..ProcessConfig::default()
        }),
        pty: Some(Pty {
            size: Some(PtySize { cols: 80, rows: 24 }),
        }),
        ..StartRequest::default()
    };
    let mut agent = guest.agent(site.api, Pace::Full)?;
    let mut stream = agent.stream("process.Process/Start", &start, None, None, ENDLESS)?;
    *pid = Some(stream.pid());
    let mut number = 0;
    while site.goes_on() {
        number += 1;
        let began = monotonic_ns();
        let word = format!("word-{number}\n");
        let sent = type_word(site, guest, stream.pid(), &word);
        let seen = match sent {
            // The stream itself shows whether it was cut.
            Err(trouble) => trouble.failed(),
            Ok(()) => {
                hear(&mut stream, &format!("word-{number}\r\n"))?;
                Seen::Done
            }
        };
        site.record(Work::Pty, began, seen);
        site.pause(STEP);
    }
    Ok(())
}

fn type_word(site: &Site<'_>, guest: &Guest, pid: u32, word: &str) -> Result<(), Trouble> {
    let input = SendInputRequest {
        process: selector(pid),
        input: ProcessInput {
            stdin: None,
            pty: Some(Blob(word.as_bytes().to_vec())),
        },
    };
    let mut agent = guest.agent(site.api, Pace::Full)?;
    let _: Empty = agent.call("process.Process/SendInput", &input)?;
    Ok(())
}

/// Reads until the word has come twice.
fn hear(stream: &mut ExecStream<'_, Line>, word: &str) -> Result<(), Fault> {
    let mut heard = String::new();
    while heard.matches(word).count() < 2 {
        let Some(event) = stream.next_event()? else {
            return Err(Fault::Wrong(
                "the stream of a terminal ended as if complete".to_owned(),
            ));
        };
        let data = event.data.and_then(|data| data.pty).unwrap_or_default().0;
        heard.push_str(&String::from_utf8_lossy(&data));
    }
    Ok(())
}

/// Creates files in a directory, and waits for the change that its watch reports.
pub(super) fn watch(site: &Site<'_>, mut random: SplitMix64) {
    let mut number = 0;
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let began = monotonic_ns();
        let mut is_established = false;
        match follow(site, guest, &mut number, &mut is_established) {
            Ok(()) => {}
            Err(fault) if is_established => site.record(Work::Watch, monotonic_ns(), fault.cut()),
            Err(fault) => site.record(Work::Watch, began, fault.seen()),
        }
    }
}

fn follow(
    site: &Site<'_>,
    guest: &Guest,
    number: &mut u64,
    is_established: &mut bool,
) -> Result<(), Fault> {
    let mut writer = guest.agent(site.api, Pace::Full)?;
    // Creates the directory.
    writer.write_file(&format!("{WATCHED}/first"), b"", None)?;
    let mut agent = guest.agent(site.api, Pace::Full)?;
    let request = WatchDirRequest {
        path: WATCHED.to_owned(),
        ..WatchDirRequest::default()
    };
    let mut stream = agent.watch(&request, ENDLESS)?;
    *is_established = true;
    while site.goes_on() {
        *number += 1;
        let began = monotonic_ns();
        let name = format!("f-{number}");
        let seen = match write_one(site, guest, &format!("{WATCHED}/{name}")) {
            Err(trouble) => trouble.failed(),
            Ok(()) => {
                await_change(&mut stream, &name)?;
                Seen::Done
            }
        };
        site.record(Work::Watch, began, seen);
        site.pause(STEP);
    }
    Ok(())
}

fn write_one(site: &Site<'_>, guest: &Guest, path: &str) -> Result<(), Trouble> {
    let mut agent: EnvdClient<Line> = guest.agent(site.api, Pace::Full)?;
    agent.write_file(path, b"", None)?;
    Ok(())
}

fn await_change(stream: &mut WatchStream<'_, Line>, name: &str) -> Result<(), Fault> {
    let began = monotonic_ns();
    loop {
        match stream.next_change()? {
            Some(change) if change.name == name && change.kind == EventType::Create => {
                return Ok(());
            }
            Some(_) if monotonic_ns() - began > model::clock::nanoseconds(IDLE) => {
                return Err(Fault::Trouble(Trouble {
                    cause: Cause::Timeout,
                    text: format!("no change of {name} was reported"),
                }));
            }
            Some(_) => {}
            None => {
                return Err(Fault::Wrong(
                    "the stream of a watch ended as if complete".to_owned(),
                ));
            }
        }
    }
}
