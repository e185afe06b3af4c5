//! Sandboxes that all need more memory at once than the host has for them.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    http,
    process::{PATIENCE, Sandbox, Server, happens, is_running, until},
};

/// Number of sandboxes, and the memory that each fills.
const SMALL: (u64, u64) = (16, 120);
/// The memory that each fills if CUBE_TEST_PRESSURE is their number: 200 need a quiet host of 24 GiB.
const LARGE_MIB: u64 = 200;
/// A guest fills some 10 MiB per second on a busy host with nested virtualization.
const SLOW: Duration = Duration::from_secs(900);

/// Upload that tells a sandbox to fill its memory.
const GO: &str = "/files?username=root&path=/dev/shm/go";

fn available_mib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() / 1024
}

fn metric(server: &Server, name: &str) -> u64 {
    let text = server.get("/metrics").expect(200).text();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("cube_pool_{name} ")));
    line.unwrap().parse().unwrap()
}

/// A command that prints the content of a sandbox's memory. Large writes, because small ones take a guest minutes.
fn content(number: usize, each_mib: u64) -> String {
    let block = "/dev/shm/block";
    format!("yes {number} | head -c 1M > {block}; yes {block} | head -n {each_mib} | xargs cat")
}

/// Creates a sandbox that fills its memory when told to. Hundreds of them wait, so waiting starts no processes.
fn prepared(server: &Server, number: usize, each_mib: u64) -> Sandbox {
    let sandbox = server.create(&json!({"timeout": 3600}));
    server.write_file(&sandbox, "/root/note", &format!("note {number}"));
    let fill = content(number, each_mib);
    let wait = "mkfifo /dev/shm/wait; exec 3<> /dev/shm/wait; until [ -e /dev/shm/go ]; do read -t 1 <&3; done";
    let script = format!(
        "bash -c '{wait}; ({fill}) > /dev/shm/fill && touch /dev/shm/done' >/dev/null 2>&1 &"
    );
    server.sh(&sandbox, &script);
    sandbox
}

/// Asks for a sandbox's state and its process; none may be gone.
fn all_live(server: &Server, sandboxes: &[Sandbox]) {
    let listed = server.list();
    for sandbox in sandboxes {
        assert!(listed.contains(&sandbox.id), "{} is gone", sandbox.id);
        assert!(is_running(server.vmm_of(sandbox)), "{}", sandbox.id);
    }
    assert_eq!(metric(server, "died_total"), 0);
}

fn headers(sandbox: &Sandbox) -> [(&str, &str); 4] {
    [
        ("E2b-Sandbox-Id", &sandbox.id),
        ("E2b-Sandbox-Port", "49983"),
        ("X-Access-Token", &sandbox.token),
        ("Content-Type", "application/octet-stream"),
    ]
}

/// Tells a sandbox again to fill its memory, because the first request may have been cut off. Returns whether it has; a
/// stopped sandbox does not respond.
fn has_filled(server: &Server, sandbox: &Sandbox) -> bool {
    let done = "/files?username=root&path=/dev/shm/done";
    [("POST", GO), ("GET", done)].iter().all(|(method, path)| {
        let answer = http::try_send(server.address, method, path, &headers(sandbox), b"go");
        answer.is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200"))
    })
}

fn eventually(what: &str, condition: impl FnMut() -> bool) {
    assert!(happens(SLOW, condition), "never: {what}");
}

/// Sets the flag when it is dropped, also by a failed assertion.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Asks for the server's health until the flag is set. Returns the number of responses.
fn watch_health(server: &Server, is_over: &AtomicBool) -> u32 {
    let mut answers = 0;
    while !is_over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let health = http::send(server.address, "GET", "/health", &[], b"");
        assert_eq!(health.status, 200);
        assert!(asked.elapsed() < PATIENCE, "{:?}", asked.elapsed());
        answers += 1;
    }
    answers
}

/// Tells all sandboxes to fill their memory, and waits until the server has stopped some. Requests to stopped sandboxes
/// wait, so the responses are not read.
fn grow_all(server: &Server, sandboxes: &[Sandbox]) {
    let asked: Vec<_> = sandboxes
        .iter()
        .map(|sandbox| http::open(server.address, "POST", GO, &headers(sandbox), b"go"))
        .collect();
    eventually("sandboxes that grow are stopped", || {
        metric(server, "stopped") > 0
    });
    drop(asked);
}

pub(crate) fn kvm_sandboxes_that_all_grow_at_once_lose_nothing() {
    let large = std::env::var("CUBE_TEST_PRESSURE").map(|text| (text.parse().unwrap(), LARGE_MIB));
    let (most, each_mib) = large.unwrap_or(SMALL);
    let available = available_mib();
    // They get half of what they will want, and the host keeps a GiB for the test and its other programs.
    let count = most.min(available.saturating_sub(1024) * 2 / each_mib);
    let room = count * each_mib / 2;
    let reserve = format!("{}MiB", available - room);
    println!("{count} sandboxes of {each_mib} MiB in {room} MiB");
    let mut server = Server::with(&[
        "--insecure-loopback",
        "--warm",
        "1:1",
        "--memory-reserve",
        &reserve,
        "--max-sandboxes",
        "400",
    ]);
    let quiet = server.create(&json!({"timeout": 3600}));
    let mut sandboxes: Vec<_> = (0..usize::try_from(count).unwrap())
        .map(|number| prepared(&server, number, each_mib))
        .collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let health = scope.spawn(|| watch_health(&server, &is_over));
        let over = Over(&is_over);
        grow_all(&server, &sandboxes);
        until("no warm slot is left", || metric(&server, "warm") == 0);
        let refused = server.ask(&json!({})).expect(429);
        let why = refused.text();
        assert!(why.contains("short of memory"), "{why}");
        assert!(refused.header("retry-after").is_some());
        all_live(&server, &sandboxes);
        // A sandbox that keeps to what was expected of it is not stopped for the others.
        assert_eq!(server.sh(&quiet, "echo here"), "here\n");
        drop(over);
        assert!(health.join().unwrap() > 0);
    });

    // A server that is killed leaves stopped VMs to the next one.
    server.crash_and_restart();
    until("the next server defends the host", || {
        metric(&server, "stopped") > 0
    });
    all_live(&server, &sandboxes);

    // The others continue when some end, and find what they had.
    let kept = sandboxes.len() / 8;
    for sandbox in sandboxes.drain(kept..) {
        server.delete(&sandbox.path("")).expect(204);
    }
    for (number, sandbox) in sandboxes.iter().enumerate() {
        eventually("the sandbox has filled its memory", || {
            has_filled(&server, sandbox)
        });
        let content = content(number, each_mib);
        let script = format!("({content}) | cmp - /dev/shm/fill && echo same");
        assert_eq!(server.sh(sandbox, &script), "same\n");
        assert_eq!(
            server.read_file(sandbox, "/root/note"),
            format!("note {number}")
        );
    }
    eventually("creates work again", || {
        server.ask(&json!({})).status == 201
    });
    all_live(&server, &sandboxes);
}
