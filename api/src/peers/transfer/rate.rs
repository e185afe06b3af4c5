//! A limit of bytes per second.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use model::Bytes;
use tokio::time::Instant;

/// Admits transfers one after the other, each for as long as its bytes take at this rate.
#[derive(Debug)]
pub(crate) struct Rate {
    bytes_per_s: u64,
    /// When the next transfer may begin.
    next: Mutex<Instant>,
}

impl Rate {
    pub(crate) fn new(per_second: Bytes) -> Self {
        Self {
            bytes_per_s: per_second.0.max(1),
            next: Mutex::new(Instant::now()),
        }
    }

    /// Waits until `bytes` may pass.
    pub(crate) async fn take(&self, bytes: u64) {
        let turn = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = (*next).max(Instant::now());
            *next = turn + duration_of(bytes, self.bytes_per_s);
            turn
        };
        tokio::time::sleep_until(turn).await;
    }
}

fn duration_of(bytes: u64, per_second: u64) -> Duration {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(per_second);
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}
