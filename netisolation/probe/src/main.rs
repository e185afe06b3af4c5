//! `cube-netprobe ORDER`: carries out the probes of an order, given as JSON, and prints a finding a line.

mod probe;

use std::{process::ExitCode, thread};

use netprobe::Order;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(text), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: cube-netprobe ORDER, an order being JSON: {{\"probes\": […]}}");
        return ExitCode::from(2);
    };
    let order: Order = match serde_json::from_str(&text) {
        Ok(order) => order,
        Err(error) => {
            eprintln!("cube-netprobe: this is no order: {error}");
            return ExitCode::from(2);
        }
    };
    thread::scope(|scope| {
        for probe in &order.probes {
            scope.spawn(|| say(&probe::carry_out(probe)));
        }
    });
    ExitCode::SUCCESS
}

fn say(finding: &netprobe::Finding) {
    // A finding is plain values; one line is one write, so that lines of threads do not mix.
    let line = serde_json::to_string(finding).unwrap_or_default();
    println!("{line}");
}
