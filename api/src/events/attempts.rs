//! The latest delivery attempts of each webhook, in memory. They show the webhook's operator why events do not arrive.

use std::collections::{BTreeMap, HashMap, VecDeque};

use envd::Timestamp;
use rest::{
    DeliveryBucket, DeliveryDurations, DeliveryStats, DeliveryStatus, WebhookDelivery,
    WebhookDeliveryGroup,
};

/// Maximum number of attempts kept per webhook.
const MAX_KEPT: usize = 200;
/// Maximum size of the kept part of a request body, in bytes.
const MAX_BODY: usize = 4096;
const HOUR_NS: u64 = 3_600_000_000_000;

/// Filter of attempts for a client.
#[derive(Clone, Debug, Default)]
pub(crate) struct WantedAttempts {
    /// Inclusive.
    pub(crate) start_ns: Option<u64>,
    /// Exclusive.
    pub(crate) end_ns: Option<u64>,
    /// Empty: both.
    pub(crate) statuses: Vec<DeliveryStatus>,
    /// Empty: all.
    pub(crate) kinds: Vec<String>,
}

impl WantedAttempts {
    fn includes(&self, attempt: &WebhookDelivery) -> bool {
        let at_ns = attempt.timestamp.unix_ns();
        self.start_ns.is_none_or(|start| at_ns >= start)
            && self.end_ns.is_none_or(|end| at_ns < end)
            && (self.statuses.is_empty() || self.statuses.contains(&attempt.status))
            && (self.kinds.is_empty() || self.kinds.contains(&attempt.event_type))
    }
}

/// An attempt with the number of its event.
#[derive(Debug)]
struct Attempt(u64, WebhookDelivery);

/// The attempts by webhook, oldest first.
#[derive(Debug, Default)]
pub(super) struct Attempts(HashMap<String, VecDeque<Attempt>>);

impl Attempts {
    /// `number` is the event's number in the log.
    pub(super) fn add(&mut self, number: u64, mut attempt: WebhookDelivery) {
        let end = attempt.request_body.floor_char_boundary(MAX_BODY);
        attempt.request_body.truncate(end);
        attempt.request_body.shrink_to_fit();
        let kept = self.0.entry(attempt.webhook_id.clone()).or_default();
        if kept.len() >= MAX_KEPT {
            kept.pop_front();
        }
        kept.push_back(Attempt(number, attempt));
    }

    pub(super) fn forget(&mut self, hook: &str) {
        self.0.remove(hook);
    }

    /// The attempts grouped by event, with its number.
    pub(super) fn groups(
        &self,
        hook: &str,
        wanted: &WantedAttempts,
    ) -> BTreeMap<u64, WebhookDeliveryGroup> {
        let mut groups = BTreeMap::new();
        for Attempt(number, attempt) in self.0.get(hook).into_iter().flatten() {
            if !wanted.includes(attempt) {
                continue;
            }
            let group = groups
                .entry(*number)
                .or_insert_with(|| WebhookDeliveryGroup {
                    event_id: attempt.event_id.clone(),
                    event_type: attempt.event_type.clone(),
                    sandbox_id: attempt.sandbox_id.clone(),
                    attempts: Vec::new(),
                });
            group.attempts.push(attempt.clone());
        }
        groups
    }

    pub(super) fn stats(&self, hook: &str, wanted: &WantedAttempts) -> DeliveryStats {
        let mut total = Sum::default();
        let mut hours: BTreeMap<u64, Sum> = BTreeMap::new();
        for Attempt(_, attempt) in self.0.get(hook).into_iter().flatten() {
            if wanted.includes(attempt) {
                total.add(attempt);
                let hour = attempt.timestamp.unix_ns() / HOUR_NS;
                hours.entry(hour).or_default().add(attempt);
            }
        }
        let bucket = |(hour, sum): (u64, Sum)| DeliveryBucket {
            timestamp: Timestamp::from_unix_ns(hour * HOUR_NS),
            total: sum.total,
            failed: sum.failed,
            duration_ms: sum.durations(),
        };
        DeliveryStats {
            buckets: hours.into_iter().map(bucket).collect(),
            total: total.total,
            failed: total.failed,
            duration_ms: total.durations(),
        }
    }
}

#[derive(Default)]
struct Sum {
    total: u64,
    failed: u64,
    minimum: u32,
    maximum: u32,
    all_ms: f64,
}

impl Sum {
    fn add(&mut self, attempt: &WebhookDelivery) {
        let ms = u32::try_from(attempt.duration_ms).unwrap_or(u32::MAX);
        self.minimum = if self.total == 0 {
            ms
        } else {
            self.minimum.min(ms)
        };
        self.maximum = self.maximum.max(ms);
        self.all_ms += f64::from(ms);
        self.total += 1;
        self.failed += u64::from(attempt.status == DeliveryStatus::Failed);
    }

    fn durations(&self) -> DeliveryDurations {
        // At most MAX_KEPT.
        let count = u32::try_from(self.total).unwrap_or(u32::MAX).max(1);
        DeliveryDurations {
            minimum: self.minimum.into(),
            average: self.all_ms / f64::from(count),
            maximum: self.maximum.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(hour: u64, status: DeliveryStatus, duration_ms: u64) -> WebhookDelivery {
        WebhookDelivery {
            id: String::new(),
            team_id: String::new(),
            webhook_id: "h".into(),
            event_id: "e".into(),
            sandbox_id: "s".into(),
            event_type: "k".into(),
            status,
            duration_ms,
            request_body: "é".repeat(MAX_BODY),
            request_headers: String::new(),
            request_url: String::new(),
            response_http_status_code: None,
            error_class: None,
            error_message: None,
            timestamp: Timestamp::from_unix_ns(hour * HOUR_NS + 7),
        }
    }

    #[test]
    fn attempts_are_grouped_by_event_filtered_and_counted() {
        use DeliveryStatus::{Failed, Success};
        let mut attempts = Attempts::default();
        for (number, hour, status, ms) in
            [(1, 1, Failed, 10), (2, 1, Success, 2), (1, 3, Success, 3)]
        {
            attempts.add(number, attempt(hour, status, ms));
        }
        let wanted = WantedAttempts::default();
        let groups = attempts.groups("h", &wanted);
        assert_eq!(
            (groups[&1].attempts.len(), groups[&2].attempts.len()),
            (2, 1)
        );
        assert!(groups[&1].attempts[0].request_body.len() <= MAX_BODY);
        let failed = WantedAttempts {
            statuses: vec![Failed],
            ..wanted.clone()
        };
        assert_eq!(attempts.groups("h", &failed).len(), 1);
        let other = WantedAttempts {
            kinds: vec!["other".into()],
            ..wanted.clone()
        };
        assert!(attempts.groups("h", &other).is_empty());
        let stats = attempts.stats("h", &wanted);
        assert_eq!((stats.total, stats.failed, stats.buckets.len()), (3, 1, 2));
        let of_first = stats.buckets[0].duration_ms;
        assert_eq!(
            (of_first.minimum, of_first.average, of_first.maximum),
            (2.0, 6.0, 10.0)
        );
        let late = WantedAttempts {
            start_ns: Some(2 * HOUR_NS),
            end_ns: Some(3 * HOUR_NS + 7),
            ..wanted.clone()
        };
        assert_eq!(attempts.stats("h", &late).total, 0);
        attempts.forget("h");
        assert_eq!(
            attempts.stats("h", &wanted).duration_ms,
            DeliveryDurations::default()
        );
    }

    #[test]
    fn only_the_latest_attempts_are_kept() {
        let mut attempts = Attempts::default();
        for number in 0..250 {
            attempts.add(number, attempt(1, DeliveryStatus::Failed, 1));
        }
        let groups = attempts.groups("h", &WantedAttempts::default());
        assert_eq!(
            (groups.len(), *groups.keys().next().unwrap()),
            (MAX_KEPT, 50)
        );
    }
}
