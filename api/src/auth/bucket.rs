//! A token bucket that limits the request rate of one API key.

use std::time::{Duration, Instant};

/// Maximum request rate of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Long-term average rate.
    pub per_second: u32,
    /// Requests that may arrive at once after a pause.
    pub burst: u32,
}

/// The remaining tokens of one key.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    #[must_use]
    pub fn full(rate: Rate, now: Instant) -> Self {
        Self {
            tokens: f64::from(rate.burst),
            at: now,
        }
    }

    /// Returns the token of a request to the bucket.
    pub fn give_back(&mut self, rate: Rate) {
        self.tokens = (self.tokens + 1.0).min(f64::from(rate.burst));
    }

    #[must_use]
    pub fn is_full(&self, rate: Rate, now: Instant) -> bool {
        self.filled(rate, now) >= f64::from(rate.burst)
    }

    fn filled(&self, rate: Rate, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let filled = self.tokens + passed * f64::from(rate.per_second);
        filled.min(f64::from(rate.burst))
    }

    /// Takes the token of one request.
    ///
    /// # Errors
    /// Returns the time until the next token is available if the bucket does not hold a whole token.
    pub fn take(&mut self, rate: Rate, now: Instant) -> Result<(), Duration> {
        self.tokens = self.filled(rate, now);
        self.at = now;
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        let missing = (1.0 - self.tokens) / f64::from(rate.per_second.max(1));
        Err(Duration::from_secs_f64(missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_followed_by_the_steady_rate() {
        let rate = Rate {
            per_second: 10,
            burst: 3,
        };
        let start = Instant::now();
        let mut bucket = Bucket::full(rate, start);
        for _ in 0..3 {
            bucket.take(rate, start).unwrap();
        }
        let wait = bucket.take(rate, start).unwrap_err();
        assert!(wait > Duration::from_millis(99) && wait < Duration::from_millis(101));
        bucket
            .take(rate, start + Duration::from_millis(101))
            .unwrap();
        // A long pause refills no more than the burst.
        let later = start + Duration::from_secs(60);
        let taken = (0..10).filter(|_| bucket.take(rate, later).is_ok());
        assert_eq!(taken.count(), 3);
    }
}
