//! Lifetimes of sandboxes, mixes of templates, and traces.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Arrival, HoldUntil, Spacing, SteadySpec, config::positive};
use crate::trace::Trace;

/// Maximum number of templates in a mix.
const MAX_TEMPLATES: usize = 64;
/// Maximum weight of a template.
const MAX_WEIGHT: u32 = 1_000_000;

/// Range of uniformly distributed random lifetimes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetime {
    pub least: Duration,
    pub most: Duration,
}

/// A template of a mix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixSpec {
    /// Name or id, as for the target.
    pub template: String,
    /// The template's share of the starts is its weight divided by the sum of all weights.
    pub weight: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MixConfig {
    template: String,
    #[serde(default = "one")]
    weight: u32,
}

fn one() -> u32 {
    1
}

/// The templates of the scenario: from `[[mix]]`, or from the trace if it has several. With both, the templates of
/// `[[mix]]` replace those of the trace in order.
pub(super) fn mix(typed: Vec<MixConfig>, trace: Option<&Trace>) -> Result<Vec<MixSpec>, String> {
    let named = |template: &String| MixSpec {
        template: template.clone(),
        weight: 1,
    };
    let mix: Vec<MixSpec> = match (typed.is_empty(), trace) {
        (true, Some(trace)) if trace.templates.len() > 1 => {
            trace.templates.iter().map(named).collect()
        }
        _ => typed
            .into_iter()
            .map(|MixConfig { template, weight }| MixSpec { template, weight })
            .collect(),
    };
    for (n, of) in mix.iter().enumerate() {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if of.template.is_empty()
            || of.template.starts_with('.')
            || !of.template.bytes().all(is_plain)
        {
            return Err(format!(
                "mix: {:?} is not the name of a template",
                of.template
            ));
        }
        if !(1..=MAX_WEIGHT).contains(&of.weight) {
            return Err(format!(
                "mix: the weight of {} is {}, it must lie between 1 and {MAX_WEIGHT}",
                of.template, of.weight
            ));
        }
        if trace.is_none() && mix[..n].iter().any(|other| other.template == of.template) {
            return Err(format!("mix: {} is listed twice", of.template));
        }
    }
    if mix.len() > MAX_TEMPLATES {
        return Err(format!("mix has more than {MAX_TEMPLATES} templates"));
    }
    if let Some(trace) = trace
        && !mix.is_empty()
        && mix.len() != trace.templates.len()
    {
        return Err(format!(
            "the trace has {} templates and [[mix]] {}: list one for each, in its order",
            trace.templates.len(),
            mix.len()
        ));
    }
    Ok(mix)
}

/// The lifetimes of a scenario without a trace.
pub(super) fn lifetime(
    until: HoldUntil,
    text: &str,
    has_trace: bool,
) -> Result<Option<Lifetime>, String> {
    match (until, text, has_trace) {
        (HoldUntil::Lifetime, "", true) => Ok(None),
        (HoldUntil::Lifetime, "", false) => Err(
            "hold.until \"lifetime\" needs hold.lifetime, such as \"10s..120s\", or a trace".into(),
        ),
        (HoldUntil::Lifetime, _, true) => {
            Err("hold.lifetime has no meaning with a trace, which has its own".into())
        }
        (HoldUntil::Lifetime, text, false) => range(text).map(Some),
        (_, "", false) => Ok(None),
        (_, "", true) => Err("a trace has lifetimes: set hold.until to \"lifetime\"".into()),
        (_, _, _) => Err("hold.lifetime needs hold.until \"lifetime\"".into()),
    }
}

/// `10s..120s`, or `30s` for a constant lifetime.
fn range(text: &str) -> Result<Lifetime, String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let least = positive("hold.lifetime", least.trim())?;
    let most = positive("hold.lifetime", most.trim())?;
    if least > most {
        return Err(format!("hold.lifetime: {text:?} ends before it begins"));
    }
    Ok(Lifetime { least, most })
}

/// The arrivals of a trace. The plan takes the times from the trace; the rate is their mean.
pub(super) fn arrival(trace: Option<&Trace>) -> Result<(Arrival, Option<SteadySpec>), String> {
    let Some(trace) = trace else {
        return Err("arrival.trace is empty, it must name a trace file".to_owned());
    };
    let starts = u32::try_from(trace.requests.len()).map_err(|e| e.to_string())?;
    let last_ms = trace.requests.last().map_or(0, |last| last.arrival_ms);
    Ok((
        Arrival::Open {
            starts,
            rate_per_s: f64::from(starts) * 1000.0 / (last_ms.max(1) as f64),
            spacing: Spacing::Poisson,
        },
        None,
    ))
}
