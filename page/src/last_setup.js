// The plan on the screen, so that a simulation can start from it.
export const lastSetup = { current: null };
