//! Files that are sent and received more slowly than a restart takes.

use std::time::Duration;

use model::clock::monotonic_ns;
use stats::random::SplitMix64;

use super::{Fault, Site};
use crate::restarts::{
    event::{Seen, Work},
    guests::Guest,
    line::Pace,
};

/// 2 MiB in pieces of 16 KiB take 4 s.
const SIZE: usize = 2 << 20;
const SLOW: Pace = Pace::Slow(16 << 10, Duration::from_millis(30));
const SENT: &str = "/tmp/prover-upload";
const RECEIVED: &str = "/tmp/prover-download";

/// Sends files slowly, and then compares the content in the sandbox.
pub(super) fn upload(site: &Site<'_>, random: SplitMix64) {
    transfer(site, random, Work::Upload, |site, guest, content| {
        guest
            .agent(site.api, SLOW)?
            .write_file(SENT, content, None)?;
        let got = guest.agent(site.api, Pace::Full)?.read_file(SENT, None)?;
        compare(&got, content)
    });
}

/// Receives files slowly, and compares them with the sent content.
pub(super) fn download(site: &Site<'_>, random: SplitMix64) {
    transfer(site, random, Work::Download, |site, guest, content| {
        guest
            .agent(site.api, Pace::Full)?
            .write_file(RECEIVED, content, None)?;
        let got = guest.agent(site.api, SLOW)?.read_file(RECEIVED, None)?;
        compare(&got, content)
    });
}

fn transfer(
    site: &Site<'_>,
    mut random: SplitMix64,
    work: Work,
    step: impl Fn(&Site<'_>, &Guest, &[u8]) -> Result<(), Fault>,
) {
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let words = std::iter::repeat_with(|| random.next_u64().to_le_bytes());
        let content: Vec<u8> = words.take(SIZE / 8).flatten().collect();
        let began = monotonic_ns();
        let seen = step(site, guest, &content).map_or_else(Fault::of_transfer, |()| Seen::Done);
        site.record(work, began, seen);
    }
}

fn compare(got: &[u8], sent: &[u8]) -> Result<(), Fault> {
    if got == sent {
        return Ok(());
    }
    let same = got.iter().zip(sent).take_while(|(a, b)| a == b).count();
    Err(Fault::Wrong(format!(
        "the file has {} bytes instead of {}, and the first {same} are right",
        got.len(),
        sent.len()
    )))
}
