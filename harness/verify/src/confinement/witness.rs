//! What can be seen of a process from outside, in /proc.

use std::{
    fs, io,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

/// The letter of a process's state; absent: there is none.
pub(super) fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Whether a process is there and not a zombie.
pub(super) fn is_alive(pid: u32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Whether a process ends by then.
pub(super) fn ends_within(pid: u32, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while is_alive(pid) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    !is_alive(pid)
}

/// A line of /proc/PID/status; absent: it has none, or the process is gone.
pub(super) fn status(pid: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    line(&text, name)
}

/// The value of a line of a `status` file.
pub(super) fn line(text: &str, name: &str) -> Option<String> {
    let rest = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    rest.map(|value| value.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Where a link of /proc/PID leads; absent: the process is gone.
pub(super) fn link(pid: u32, name: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/{name}")).ok()
}

/// Whether a process is in another namespace than this one.
pub(super) fn moved(pid: u32, namespace: &str) -> bool {
    let of = |pid: u32| link(pid, &format!("ns/{namespace}"));
    of(pid).is_some_and(|theirs| of(std::process::id()) != Some(theirs))
}

/// A soft and a hard limit of a process, as /proc words them.
pub(super) fn limit(pid: u32, name: &str) -> io::Result<[String; 2]> {
    let text = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name));
    let mut words = rest
        .unwrap_or_default()
        .split_whitespace()
        .map(str::to_owned);
    match (words.next(), words.next()) {
        (Some(soft), Some(hard)) => Ok([soft, hard]),
        _ => Err(io::Error::other(format!("no limit {name:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_seen() {
        let own = std::process::id();
        assert!(is_alive(own));
        assert!(!moved(own, "user"));
        assert!(status(own, "Uid").unwrap().split(' ').count() == 4);
        assert_eq!(status(own, "NoSuchLine"), None);
        assert!(limit(own, "Max open files").is_ok());
        assert!(limit(own, "Max nothing").is_err());
    }
}
