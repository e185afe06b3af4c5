//! Derives findings from a history. A pure function.
//!
//! The oracle: for each sandbox there must be one order of its actions that fits all responses, in which each
//! action takes effect at one moment between its request and its response ("linearizable"). An action that failed
//! may have taken effect at any time after its request, or not at all. A fork or a snapshot has the values of such
//! a moment.
//!
//! A failure is a finding unless it is explained: the server or the VMM was killed at that time, or, for requests
//! to the agent, the sandbox was paused, killed or reached its deadline. During a pause, the API already reports
//! the sandbox as running while its agent is not found, so such refusals by the data plane prove nothing. During a
//! kill, all responses report the sandbox as absent; if the server is killed before it has recorded the kill, the
//! sandbox continues. A write that is interrupted by the end of its sandbox also reports "not found", although a
//! fork made just before may have its value.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    oracle::{State, perform},
    orders::{Open, Order, Orders},
    plan::{Action, AtDeadline, Handle, Image},
    play::{Birth, Call, History, Origin},
    site::{Miss, Reply, Seen},
};
use crate::report::{Case, Verdict};

/// Maximum number of concurrent orders before a sandbox is reported as not judged.
const MOST_ORDERS: usize = 50_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// No order of the actions fits the responses.
    Contradiction,
    /// A request failed without an explanation.
    Failure,
    /// More sandboxes exist than responses and unanswered requests explain.
    Unknown,
    /// Something was left behind, or the server did not come back.
    Leak,
}

impl Kind {
    /// Name of the case in reports.
    fn name(self) -> &'static str {
        match self {
            Self::Contradiction => "contradiction",
            Self::Failure => "failure",
            Self::Unknown => "unknown",
            Self::Leak => "leak",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) kind: Kind,
    pub(super) text: String,
}

impl Finding {
    pub(super) fn case(&self) -> Case {
        Case::new("lifecycle", self.kind.name(), "").judged(Verdict::Fail, [self.text.as_str()])
    }
}

/// The result of an episode.
#[derive(Clone, Debug, Default)]
pub(super) struct Judgement {
    pub(super) findings: Vec<Finding>,
    /// Number of sandboxes with too many failed actions to follow all their orders.
    pub(super) not_judged: usize,
}

/// Possible initial states of copies of a sandbox, and concurrent writes, which may reach the copies too.
#[derive(Clone, Debug, Default)]
struct Copied {
    states: BTreeSet<State>,
    writes: BTreeSet<usize>,
}

/// Evaluates an episode.
pub(super) fn judge(history: &History) -> Judgement {
    let mut judgement = Judgement::default();
    let mut add = |kind, text: String| judgement.findings.push(Finding { kind, text });
    for fault in &history.faults {
        add(Kind::Leak, fault.clone());
    }
    for call in &history.calls {
        if let Some(why) = unexplained(history, call) {
            add(
                Kind::Failure,
                format!("{}: {}: {why}", call.on, call.action),
            );
        }
    }
    for birth in &history.births {
        if let Some(why) = unexplained_birth(history, birth) {
            add(Kind::Failure, format!("create {}: {why}", birth.to));
        }
    }
    let lost = unanswered(history);
    if history.unknown.len() > lost {
        let ids = history.unknown.join(", ");
        let what = format!(
            "{ids}: no answer has named them, and only {lost} creates and forks were not answered"
        );
        add(Kind::Unknown, what);
    }
    let history = &without_vain_refusals(history);
    let mut judged = Judged::default();
    for birth in births_in_order(history) {
        match judged.sandbox(history, birth) {
            Ok(()) => {}
            Err(Stop::Contradiction(text)) => add(Kind::Contradiction, text),
            Err(Stop::TooMany) => judged.given_up += 1,
            Err(Stop::Parent) => {}
        }
    }
    judgement.not_judged = judged.given_up;
    judgement.findings.sort_by_key(|finding| finding.kind);
    judgement
}

/// Turns three kinds of refusals in the history into failures, because the refused action may still have had an
/// effect: refusals by the data plane during a pause or at a deadline (the action may have begun before, and may
/// continue after a resume); refusals of writes while the sandbox ends (the write may have begun before); and
/// refusals during a kill without a response.
fn without_vain_refusals(history: &History) -> History {
    let hides = |action| matches!(action, Action::Pause(_) | Action::Deadline);
    let ends = |action| matches!(action, Action::Kill | Action::KillVmm);
    let mut weighed = history.clone();
    for (call, weighed) in history.calls.iter().zip(&mut weighed.calls) {
        let is_refused = call.outcome == Ok(Reply::NotFound) && is_of_agent(call.action);
        let is_absent = matches!(
            call.outcome,
            Ok(Reply::NotFound | Reply::State(Seen::Absent))
        );
        let is_write = matches!(call.action, Action::Write(..));
        if (is_refused && is_cut(history, call, hides))
            || (is_refused && is_write && is_cut(history, call, ends))
            || (is_absent && during_lost_kill(history, call))
        {
            weighed.outcome = Err(Miss::Failed("not found during a change".to_owned()));
        }
    }
    weighed
}

/// Whether the call overlaps with a kill of the same sandbox that got no response because the server ended, and was
/// made before the next server started.
fn during_lost_kill(history: &History, call: &Call) -> bool {
    let is_lost =
        |kill: &&Call| kill.action == Action::Kill && matches!(kill.outcome, Err(Miss::Failed(_)));
    let is_undone = |kill: &Call| {
        let mut outages = history.outages.iter();
        outages.any(|outage| overlap(*outage, span(kill)) && call.invoked_ns <= outage.1)
    };
    let mut kills = history.calls.iter().filter(is_lost);
    kills.any(|kill| kill.on == call.on && overlap(span(kill), span(call)) && is_undone(kill))
}

/// Number of creates and forks that may have made a sandbox whose id is in no response.
fn unanswered(history: &History) -> usize {
    let births = history.births.iter();
    let creates = births.filter(|birth| matches!(birth.outcome, Err(Miss::Failed(_))));
    let is_fork = |call: &&Call| {
        matches!(call.action, Action::Fork(_)) && matches!(call.outcome, Err(Miss::Failed(_)))
    };
    creates.count() + history.calls.iter().filter(is_fork).count()
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 <= b.1 && b.0 <= a.1
}

fn span(call: &Call) -> (u64, u64) {
    (call.invoked_ns, call.returned_ns)
}

fn in_outage(history: &History, span: (u64, u64)) -> bool {
    history.outages.iter().any(|outage| overlap(*outage, span))
}

fn is_of_agent(action: Action) -> bool {
    matches!(action, Action::Exec | Action::Write(..) | Action::Read(_))
}

/// Whether the call overlaps with another action on the same sandbox that satisfies `cuts`.
fn is_cut(history: &History, call: &Call, cuts: impl Fn(Action) -> bool) -> bool {
    let mut others = history.calls.iter();
    others
        .any(|other| other.on == call.on && cuts(other.action) && overlap(span(other), span(call)))
}

/// Why a call alone is a finding.
fn unexplained(history: &History, call: &Call) -> Option<String> {
    let why = match &call.outcome {
        Ok(_) | Err(Miss::Busy(_)) => return None,
        // Reported as the failure of the request that set the deadline.
        Err(_) if call.action == Action::Deadline => return None,
        Err(Miss::NotSent(why) | Miss::Wrong(why)) => return Some(why.clone()),
        Err(Miss::Failed(why)) => why,
        Err(Miss::NotFound | Miss::Conflict) => return Some(format!("{:?}", call.outcome)),
    };
    let cuts = |action| match action {
        Action::KillVmm => true,
        Action::Pause(_) | Action::Kill | Action::Deadline => is_of_agent(call.action),
        _ => false,
    };
    let is_explained = in_outage(history, span(call)) || is_cut(history, call, cuts);
    (!is_explained).then(|| why.clone())
}

fn unexplained_birth(history: &History, birth: &Birth) -> Option<String> {
    let span = (birth.invoked_ns, birth.returned_ns);
    match &birth.outcome {
        Ok(_) | Err(Miss::Busy(_)) => None,
        Err(Miss::Failed(_)) if in_outage(history, span) => None,
        Err(Miss::Failed(why) | Miss::NotSent(why) | Miss::Wrong(why)) => Some(why.clone()),
        Err(refusal @ (Miss::NotFound | Miss::Conflict)) => Some(format!("{refusal:?}")),
    }
}

/// Sandboxes whose id is known, sources before their forks.
fn births_in_order(history: &History) -> Vec<&Birth> {
    let mut births: Vec<&Birth> = history
        .births
        .iter()
        .filter(|b| b.outcome.is_ok())
        .collect();
    births.sort_by_key(|birth| birth.invoked_ns);
    births
}

/// Why the judgement of a sandbox ended.
enum Stop {
    Contradiction(String),
    TooMany,
    /// The source of the sandbox could not be judged completely.
    Parent,
}

#[derive(Default)]
struct Judged {
    forks: BTreeMap<Handle, Copied>,
    images: BTreeMap<Image, Copied>,
    given_up: usize,
}

/// An event in a sandbox's history. At equal times, requests come before responses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Edge {
    Request,
    Answer,
}

impl Judged {
    fn sandbox(&mut self, history: &History, birth: &Birth) -> Result<(), Stop> {
        let start = match birth.from {
            Origin::Template => Copied {
                states: BTreeSet::from([State::NEW]),
                writes: BTreeSet::new(),
            },
            Origin::Snapshot(image) => self.images.get(&image).cloned().unwrap_or_default(),
            Origin::Fork(_) => self.forks.get(&birth.to).cloned().unwrap_or_default(),
        };
        if start.states.is_empty() {
            return Err(Stop::Parent);
        }
        let mut open = Open {
            unanswered: start.writes,
            ..Open::default()
        };
        let mut orders: Orders = start.states.into_iter().map(State::copied).collect();
        for (_, edge, at) in edges(history, birth.to) {
            let call = &history.calls[at];
            match edge {
                Edge::Request if call.outcome.is_ok() => drop(open.answered.insert(at)),
                Edge::Request => drop(open.unanswered.insert(at)),
                Edge::Answer => {
                    let all = self.follow(history, birth.at_deadline, orders, &open, Some(at))?;
                    orders = all.with(at);
                    if orders.is_empty() {
                        return Err(Stop::Contradiction(contradiction(history, birth, call)));
                    }
                    open.answered.remove(&at);
                }
            }
        }
        // A failed operation may have taken effect.
        self.follow(history, birth.at_deadline, orders, &open, None)?;
        Ok(())
    }

    /// All orders that follow from these if open calls take effect now, up to and including the call `until`.
    fn follow(
        &mut self,
        history: &History,
        at_deadline: AtDeadline,
        mut all: Orders,
        open: &Open,
        until: Option<usize>,
    ) -> Result<Orders, Stop> {
        let mut next: Vec<Order> = all.iter().collect();
        while let Some(order) = next.pop() {
            if until.is_some_and(|at| order.answered.contains(&at)) {
                continue;
            }
            for at in open.without(&order) {
                let call = &history.calls[at];
                let (reply, after) = perform(order.state, call.action, at_deadline);
                if call.outcome.as_ref().is_ok_and(|answer| *answer != reply) {
                    continue;
                }
                if reply == Reply::Done {
                    self.copy(history, open, &order, call.action);
                }
                let longer = order.clone().then(at, after, open);
                if all.insert(longer.clone()) {
                    next.push(longer);
                }
            }
            if all.len() > MOST_ORDERS {
                return Err(Stop::TooMany);
            }
        }
        Ok(all)
    }

    /// Records the state that a fork or a snapshot copies.
    fn copy(&mut self, history: &History, open: &Open, order: &Order, action: Action) {
        let copied = match action {
            Action::Fork(to) => self.forks.entry(to).or_default(),
            Action::Snapshot(image) => self.images.entry(image).or_default(),
            _ => return,
        };
        copied.states.insert(order.state);
        let is_write = |at: &usize| matches!(history.calls[*at].action, Action::Write(..));
        copied.writes.extend(open.without(order).filter(is_write));
    }
}

/// Requests and responses of a sandbox that restrict its orders, by time. A failed action has no response.
fn edges(history: &History, of: Handle) -> Vec<(u64, Edge, usize)> {
    let mut edges = Vec::new();
    let calls = history.calls.iter().enumerate();
    for (at, call) in calls.filter(|(_, call)| call.on == of) {
        match &call.outcome {
            Ok(_) => {
                edges.push((call.invoked_ns, Edge::Request, at));
                edges.push((call.returned_ns, Edge::Answer, at));
            }
            Err(Miss::Failed(_)) if has_effect(call.action) => {
                edges.push((call.invoked_ns, Edge::Request, at));
            }
            Err(_) => {}
        }
    }
    edges.sort_unstable();
    edges
}

fn has_effect(action: Action) -> bool {
    match action {
        Action::Write(..)
        | Action::Pause(_)
        | Action::Connect
        | Action::Resume
        | Action::Extend
        | Action::Expire
        | Action::Deadline
        | Action::Kill
        | Action::KillVmm => true,
        Action::Exec | Action::Read(_) | Action::Snapshot(_) | Action::Fork(_) | Action::Look => {
            false
        }
    }
}

/// The response that no order explains, and the history of the sandbox up to it.
fn contradiction(history: &History, birth: &Birth, wrong: &Call) -> String {
    let id = birth.outcome.as_deref().unwrap_or_default();
    let mut text = format!(
        "{} ({id}): {}: the answer {:?} contradicts the earlier ones:",
        birth.to, wrong.action, wrong.outcome
    );
    let from = match birth.from {
        Origin::Template => "the template".to_owned(),
        Origin::Snapshot(image) => format!("snapshot {}", image.0),
        Origin::Fork(of) => of.to_string(),
    };
    let ms = |ns: u64| (ns as f64 - birth.invoked_ns as f64) / 1e6;
    text += &format!("\n    {:>8.1} ms  made from {from}", 0.0);
    let is_of_it = |call: &&Call| call.on == birth.to || Origin::Fork(call.on) == birth.from;
    let of_it = history.calls.iter().filter(is_of_it);
    for call in of_it.filter(|call| call.invoked_ns <= wrong.returned_ns) {
        text += &format!(
            "\n    {:>8.1} to {:.1} ms  client {}: {}: {}: {:?}",
            ms(call.invoked_ns),
            ms(call.returned_ns),
            call.client,
            call.on,
            call.action,
            call.outcome
        );
    }
    let since = (birth.invoked_ns, wrong.returned_ns);
    for outage in history
        .outages
        .iter()
        .filter(|outage| overlap(**outage, since))
    {
        text += &format!(
            "\n    {:>8.1} to {:.1} ms  no server",
            ms(outage.0),
            ms(outage.1)
        );
    }
    text
}
