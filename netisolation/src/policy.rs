//! The network policy of one sandbox. Pure: reads no maps and no clock.

mod lists;
mod name;
mod rules;

pub use lists::DefaultEgress;
pub use name::{NamePattern, Naming, PolicyError};
pub use rules::{Policy, Rule, RuleAction};
