"""Log text -> `Case` (log_diagnosis) -> `causes/` -> `fixes/` -> `Diagnosis` (verdict)."""
