//! `cube-netprobe ORDER`: carries out the probes of an order in JSON, and prints one finding per line.

mod probe;

use std::{process::ExitCode, thread};

use netprobe::Order;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(text), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: cube-netprobe ORDER, where ORDER is JSON: {{\"probes\": […]}}");
        return ExitCode::from(2);
    };
    let order: Order = match serde_json::from_str(&text) {
        Ok(order) => order,
        Err(error) => {
            eprintln!("cube-netprobe: cannot parse the order: {error}");
            return ExitCode::from(2);
        }
    };
    thread::scope(|scope| {
        for probe in &order.probes {
            scope.spawn(|| print(&probe::carry_out(probe)));
        }
    });
    ExitCode::SUCCESS
}

fn print(finding: &netprobe::Finding) {
    // Serializing plain values cannot fail. One write per line keeps the lines of different threads apart.
    let line = serde_json::to_string(finding).unwrap_or_default();
    println!("{line}");
}
