//! The network policy of one sandbox. Pure: reads no maps and no clock.

mod forbidden;
mod lists;
mod name;
mod rules;

pub(crate) use forbidden::Verdict;
pub use forbidden::{Destinations, ForbiddenAddresses, canonical};
pub use lists::DefaultEgress;
pub use name::{NamePattern, Naming, PolicyError};
pub use rules::{Access, Policy, Rule, RuleAction};
