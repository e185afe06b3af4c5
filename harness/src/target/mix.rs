//! Sandboxes from several templates of one server. The plan chooses the template of each.

use std::{collections::BTreeMap, io};

use model::Timeline;

use super::{About, CloneId, PageCache, Pool, Sandbox, Target, e2b::E2b};
use crate::{event::Failure, plan::Plan};

/// The same server, once for each template.
#[derive(Debug)]
pub struct Mix {
    /// Also used for queries about the server itself.
    first: E2b,
    others: Vec<E2b>,
    /// Position of the template of each arrival, by round.
    templates: BTreeMap<u32, Vec<u16>>,
}

impl Mix {
    /// `others` are the templates after that of `first`, which is the first template of the scenario.
    #[must_use]
    pub fn new(first: E2b, others: &[String], plan: &Plan) -> Self {
        let with = |template: &String| E2b {
            template: template.clone(),
            ..first.clone()
        };
        let rounds = plan.rounds.iter();
        Self {
            others: others.iter().map(with).collect(),
            first,
            templates: rounds
                .map(|round| (round.index, round.templates.clone()))
                .collect(),
        }
    }

    fn of(&self, id: CloneId) -> &E2b {
        let arrival = usize::try_from(id.arrival).unwrap_or(usize::MAX);
        let of_round = self.templates.get(&id.round);
        let template = of_round.and_then(|of_round| of_round.get(arrival));
        match template.copied().unwrap_or(0) {
            0 => &self.first,
            n => self.others.get(usize::from(n) - 1).unwrap_or(&self.first),
        }
    }
}

impl Target for Mix {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        self.of(id).create(id, timeline)
    }

    fn prepare_cache(&self, wanted: PageCache) -> io::Result<()> {
        self.first.prepare_cache(wanted)
    }

    fn await_ready(&self) -> io::Result<()> {
        self.first.await_ready()
    }

    fn cpu_ns(&self) -> Option<u64> {
        self.first.cpu_ns()
    }

    fn pool(&self) -> Option<Pool> {
        self.first.pool()
    }

    fn about(&self) -> About {
        self.first.about()
    }
}
