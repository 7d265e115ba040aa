// Made by vite.config.ts from world-atlas.
declare module "virtual:land" {
  /** Of the whole world in Mercator's projection, in the path's units. */
  export const WIDTH: number;
  /** The land as a path; longitude 0 at the equator is its origin. */
  const land: string;
  export default land;
}
