//! The text of a report on cycles.

use std::fmt;

use super::Cycles;

impl fmt::Display for Cycles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16}{value}");
        let millions = |cycles: f64| format!("{:.2}", cycles / 1e6);
        let milliseconds = |seconds: f64| format!("{:.2}", 1e3 * seconds);
        line(
            "schedule",
            format!(
                "{} ms: {} million cycles at {} GHz, MFU {:.1}%; {:.0} operations run",
                milliseconds(self.seconds),
                millions(self.cycles),
                self.clock / 1e9,
                100.0 * self.utilization,
                self.op_runs
            ),
        )?;
        line("", format!("{:<32}{:>10}{:>10}{:>12}", "", "M cycles", "ms", "operations"))?;
        for part in &self.parts {
            line(
                "",
                format!(
                    "{:<32}{:>10}{:>10}{:>12.0}",
                    part.part.name(),
                    millions(part.cycles),
                    milliseconds(part.seconds),
                    part.op_runs
                ),
            )?;
        }
        let mut left_out = vec!["the start of each operation".to_owned()];
        let asynchronous: Vec<String> =
            self.left_out.asynchronous.iter().map(|(kind, runs)| format!("{runs:.0} {kind}")).collect();
        if !asynchronous.is_empty() {
            left_out.push(format!("waits for asynchronous work ({})", asynchronous.join(", ")));
        }
        line("  left out", left_out.join(", "))?;
        if self.left_out.without_schedule > 0.0 {
            let runs = self.left_out.without_schedule;
            line("  estimated", format!("{runs:.0} operations without a dumped schedule"))?;
        }
        if self.left_out.guessed_loops > 0 {
            let loops = self.left_out.guessed_loops;
            line("  guessed", format!("the trips of {loops} loops: half of the loop around them"))?;
        }
        for (index, operation) in self.costliest.iter().enumerate() {
            let scope = if operation.scope.is_empty() { "no scope" } else { &operation.scope };
            line(
                if index == 0 { "costliest" } else { "" },
                format!(
                    "{:>10} M cycles, {:.0} times: `{}` in {scope} ({})",
                    millions(operation.cycles),
                    operation.runs,
                    operation.name,
                    operation.part.name()
                ),
            )?;
        }
        Ok(())
    }
}
