//! A pool of many templates in simulated time: creates arrive, slots are filled one after another, and the budget is
//! divided repeatedly. The policy makes all decisions.

use std::time::Duration;

use proptest::prelude::*;

use super::{
    Budget, Claim, Creates, Held, Lack, Need, Room, Stock, Supplied, divide, is_idle, marks,
    refilling, supply_first,
};
use crate::config::WarmMarks;

const IDLE: Duration = Duration::from_secs(600);
const FILL: Duration = Duration::from_millis(50);
const SLOT_BYTES: u64 = 16;
const LOAD_BYTES: u64 = 100;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Template {
    creates: Creates,
    used_ns: Option<u64>,
    warm: u32,
    is_loaded: bool,
    loads: bool,
    marks: WarmMarks,
    refilling: bool,
    hits: u32,
    floor: WarmMarks,
    spare: WarmMarks,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sim {
    now_ns: u64,
    budget: Budget,
    templates: Vec<Template>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// This many creates of a template.
    Burst(usize, u32),
    Wait(Duration),
}

impl Sim {
    fn new(budget: Budget, templates: usize) -> Self {
        Self {
            now_ns: 1,
            budget,
            templates: vec![Template::default(); templates],
        }
    }

    fn held(&self) -> Held {
        let loaded = self.templates.iter().filter(|t| t.is_loaded).count();
        let slots = self.templates.iter().map(|t| t.warm).sum();
        Held {
            slots,
            bytes: u64::from(slots) * SLOT_BYTES + loaded as u64 * LOAD_BYTES,
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Burst(at, creates) => {
                let template = &mut self.templates[at];
                for _ in 0..creates {
                    template.creates.count(self.now_ns, IDLE);
                    template.used_ns = Some(self.now_ns);
                    if template.warm > 0 {
                        template.warm -= 1;
                        template.hits += 1;
                    }
                }
                self.divide();
            }
            Step::Wait(time) => {
                let until_ns = self.now_ns + u64::try_from(time.as_nanos()).unwrap();
                self.divide();
                while self.now_ns < until_ns && self.fill() {}
                self.now_ns = self.now_ns.max(until_ns);
                self.divide();
            }
        }
    }

    fn claim(&self, template: &Template) -> Claim {
        let is_idle = template
            .used_ns
            .is_none_or(|used_ns| is_idle(used_ns, self.now_ns, IDLE));
        Claim {
            floor: template.floor.high,
            wanted: template.creates.wanted(self.now_ns, IDLE),
            spare: template.spare.high,
            has: template.warm,
            slot_bytes: SLOT_BYTES,
            load_bytes: LOAD_BYTES,
            can_load: true,
            is_loaded: template.is_loaded,
            recent: template.creates.recent(self.now_ns, IDLE),
            used_ns: template.used_ns.unwrap_or(0),
            is_idle,
        }
    }

    fn divide(&mut self) {
        let claims: Vec<_> = self.templates.iter().map(|t| self.claim(t)).collect();
        let shares = divide(self.budget, &claims);
        for ((template, claim), share) in self.templates.iter_mut().zip(claims).zip(shares) {
            let low = template.floor.low.max(template.spare.low);
            let floor = WarmMarks {
                low,
                ..template.floor
            };
            template.marks = marks(floor, claim.wanted, share.slots);
            template.loads = share.loads;
            template.warm = template.warm.min(share.slots);
            template.is_loaded &= share.loads;
        }
        for template in &mut self.templates {
            template.refilling = refilling(&Stock {
                warm: template.warm,
                filling: 0,
                low: template.marks.low,
                high: template.marks.high,
                refilling: template.refilling,
            });
        }
    }

    /// Fills one slot or loads a template. Returns whether there was work to do.
    fn fill(&mut self) -> bool {
        let held = self.held();
        let mut due: Vec<_> = self.templates.iter_mut().filter(|t| t.refilling).collect();
        due.sort_by_key(|t| t.warm);
        let lacks = due.into_iter().map(|template| {
            let lack = Lack {
                need: Need::default(),
                slot_bytes: SLOT_BYTES,
                load_bytes: (template.loads && !template.is_loaded).then_some(LOAD_BYTES),
            };
            (template, lack)
        });
        let room = Room {
            available: 1 << 40,
            max: u32::MAX,
            ..Room::default()
        };
        let Some((template, supplied)) = supply_first(self.budget, held, &room, lacks) else {
            return false;
        };
        match supplied {
            Supplied::Memory => template.is_loaded = true,
            Supplied::Slot => {
                template.warm += 1;
                template.creates.filled(FILL);
                if template.warm >= template.marks.high {
                    template.creates.is_full();
                }
            }
        }
        self.now_ns += u64::try_from(FILL.as_nanos()).unwrap();
        self.divide();
        true
    }

    fn warm(&self) -> Vec<u32> {
        self.templates.iter().map(|t| t.warm).collect()
    }
}

const PLENTY: Budget = Budget {
    slots: 1000,
    bytes: 1 << 40,
};
const MINUTE: Step = Step::Wait(Duration::from_secs(60));

#[test]
fn a_burst_on_a_cold_template_is_served_by_the_stock_the_next_time() {
    let mut sim = Sim::new(PLENTY, 3);
    sim.take(Step::Burst(1, 40));
    assert_eq!(sim.templates[1].hits, 0);
    for round in 1..20 {
        sim.take(MINUTE);
        assert!(sim.templates[1].is_loaded);
        sim.take(Step::Burst(1, 40));
        assert_eq!(sim.templates[1].hits, round * 40);
    }
    sim.take(MINUTE);
    assert_eq!(sim.warm()[0], 0);
    sim.take(Step::Wait(IDLE));
    assert_eq!(sim.held(), Held::default(), "it is idle");
}

/// Forty unused templates with default marks, and a used one, whose demand is most of the budget.
#[test]
fn default_marks_of_templates_that_no_one_uses_give_way_to_demand() {
    let budget = Budget {
        slots: 64,
        bytes: 64 * SLOT_BYTES + 5 * LOAD_BYTES,
    };
    let mut sim = Sim::new(budget, 41);
    for template in &mut sim.templates[1..] {
        template.spare = WarmMarks { low: 2, high: 4 };
    }
    sim.take(MINUTE);
    assert_eq!(sim.held().slots, 64, "nothing else needs the room");
    let each = sim.warm();
    assert!(each[1..].iter().all(|slots| *slots > 0), "{each:?}");
    for round in 0..5 {
        sim.take(Step::Burst(0, 50));
        sim.take(Step::Wait(Duration::from_secs(10)));
        assert_eq!(sim.templates[0].hits, round * 50);
        assert_eq!((sim.warm()[0], sim.held().slots), (50, 64));
        assert!(sim.templates[0].is_loaded, "nor do they take the memory");
    }
    sim.take(Step::Wait(IDLE * 2));
    sim.take(MINUTE);
    assert_eq!((sim.warm()[0], sim.held().slots), (0, 64), "it is idle");
}

/// Three hundred templates are used in turn, with room for thirty slots and five loaded ones. Most creates must miss.
/// Templates that have a slot keep it: no slot is filled for a template that recurs only after all others.
#[test]
fn of_templates_that_are_used_in_turn_those_with_slots_keep_them() {
    let budget = Budget {
        slots: 30,
        bytes: 30 * SLOT_BYTES + 5 * LOAD_BYTES,
    };
    let mut sim = Sim::new(budget, 300);
    let mut fills = 0;
    let mut first = Vec::new();
    for turn in 0..600 {
        let before = sim.warm();
        sim.take(Step::Burst(turn % 300, 1));
        sim.take(Step::Wait(Duration::from_millis(500)));
        let after = sim.warm();
        if turn == 29 {
            first = after.clone();
        }
        fills += before.iter().zip(&after).filter(|(a, b)| b > a).count();
    }
    assert_eq!(first.iter().sum::<u32>(), 30);
    assert_eq!(sim.warm(), first);
    let hits: u32 = sim.templates.iter().map(|t| t.hits).sum();
    assert_eq!(hits, 30, "in the second round, the thirty that have slots");
    assert!(fills <= 60, "{fills} fills");
}

fn steps(templates: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..templates, 1..30_u32).prop_map(|(at, n)| Step::Burst(at, n)),
        2 => (0..5_000_u64).prop_map(|ms| Step::Wait(Duration::from_millis(ms))),
        1 => (0..900_u64).prop_map(|s| Step::Wait(Duration::from_secs(s))),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    /// Each burst finds a slot for each create, as long as the stock has time to fill and the peak still holds.
    #[test]
    fn a_burst_that_comes_again_finds_a_slot_for_each_create(
        creates in 1..100_u32, gap_s in 10..300_u64, rounds in 2..20_u32,
    ) {
        let mut sim = Sim::new(PLENTY, 1);
        sim.take(Step::Burst(0, creates));
        for round in 1..rounds {
            sim.take(Step::Wait(Duration::from_secs(gap_s)));
            sim.take(Step::Burst(0, creates));
            prop_assert_eq!(sim.templates[0].hits, round * creates);
        }
    }

    #[test]
    fn the_stock_stays_within_its_budget_keeps_the_marks_and_ends_without_use(
        steps in steps(8), slots in 1..40_u32, bytes in 0..2_000_u64, floor in 0..3_u32,
    ) {
        let mut sim = Sim::new(Budget { slots, bytes }, 8);
        sim.templates[0].floor = WarmMarks { low: floor, high: floor };
        sim.templates[1].spare = WarmMarks { low: 1, high: 1 };
        for step in steps {
            sim.take(step);
            let held = sim.held();
            prop_assert!(held.slots <= slots && held.bytes <= bytes, "{held:?}");
        }
        sim.take(Step::Wait(IDLE * 2));
        sim.take(Step::Wait(IDLE * 2));
        let fits = u32::try_from(bytes / SLOT_BYTES).unwrap();
        let first = &sim.templates[0];
        prop_assert_eq!(first.warm, floor.min(slots).min(fits), "the configured marks");
        for template in &sim.templates[2..] {
            prop_assert!(template.warm == 0 && !template.is_loaded, "{template:?}");
        }
    }
}
