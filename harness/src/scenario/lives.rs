//! How long sandboxes live, and from which templates they are.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::positive;
use crate::trace::Trace;

/// Maximum number of templates in a mix.
const MAX_TEMPLATES: usize = 64;
/// Maximum weight of a template.
const MAX_WEIGHT: u32 = 1_000_000;

/// How long clones live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldSpec {
    pub until: HoldUntil,
    /// Idle time of held clones before they are inspected and killed; with [`HoldUntil::Round`], also before the memory
    /// sample. Ignored with [`HoldUntil::Exec`].
    pub at_least: Duration,
    /// Whether each held clone repeats its first command, and the first denied exchange if any, before it is
    /// killed.
    pub exec_after: bool,
    /// Whether the CPU time of the idle clones is also measured after each measured round; only with
    /// [`HoldUntil::End`].
    #[serde(default)]
    pub idle_each_round: bool,
}

/// When clones of measured rounds are killed. Warm-up clones, cold clones, comparison clones and host processes
/// live at most until the end of their round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldUntil {
    /// After its first command and its turns.
    Exec,
    /// When its lifetime has passed since the response to its create.
    Lifetime,
    /// After all clones of its round have finished or failed and the held clones were inspected.
    Round,
    /// After the last round.
    End,
}

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

pub(super) fn one() -> u32 {
    1
}

/// The templates of the scenario: from `mode.templates`, or from the trace if it has several. With both, the templates of
/// `mode.templates` replace those of the trace in order.
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
                "mode.templates: {:?} is not the name of a template",
                of.template
            ));
        }
        if !(1..=MAX_WEIGHT).contains(&of.weight) {
            return Err(format!(
                "mode.templates: the weight of {} is {}, it must lie between 1 and {MAX_WEIGHT}",
                of.template, of.weight
            ));
        }
        if trace.is_none() && mix[..n].iter().any(|other| other.template == of.template) {
            return Err(format!("mode.templates: {} is listed twice", of.template));
        }
    }
    if mix.len() > MAX_TEMPLATES {
        return Err(format!(
            "mode.templates has more than {MAX_TEMPLATES} templates"
        ));
    }
    if let Some(trace) = trace
        && !mix.is_empty()
        && mix.len() != trace.templates.len()
    {
        return Err(format!(
            "the trace has {} templates and mode.templates {}: list one for each, in its order",
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
